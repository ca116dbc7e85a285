"""Small models for the tests of the law: each is captured and priced once, with the results of eager's step.

    its = subject("attention")
    its.again()
    ...                                           # some step on its.tensors
    its.facts(outputs) == eager("attention", 1)

`again` restores the state before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from memgraph.capture.capture import capture, operands
from memgraph.graph.accumulate_grads import accumulate_grads
from memgraph.graph.captured import Captured
from memgraph.graph.summarize import Cost, summarize
from memgraph.microbatch.microbatches import MicroBatches
from memgraph.profile.correct_fakes import apply_profiled_layouts
from memgraph.profile.op_profiler import OpProfiler
from memgraph.tensors.loss_outputs import select_losses
from passes import Machine, Trace
from passes.order.microbatch_order import order_by_section
from tests.support import models as nets

PROBER = OpProfiler(1 << 30)


class Normed(nn.Module):
    """A model that draws random numbers, and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        block = (nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3)) for _ in range(3))
        self.blocks = nn.Sequential(*block)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class Attention(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mixes = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, mix in zip(self.norms, self.mixes, strict=True):
            q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in mix(norm(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
            x = x + y.transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Pictures(nn.Module):
    """Convolutions, with in-place ops where possible."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(inplace=True))
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = x + self.body(x)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), torch.arange(len(images)) % 5)


class Views(nn.Module):
    """Values that are views and copies of one another, an output beside the loss, and a buffer that is assigned."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.ones(1, 12))
        self.register_buffer("seen", torch.zeros(12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.first(x).chunk(2, dim=-1)
        wide = self.scale.expand_as(left) * left.t().contiguous().t()
        mixed = torch.cat([wide, right.tanh()])[1:-1].sin()
        picked = self.second(mixed).unfold(1, 4, 2).exp().flatten(1)
        values, _ = picked.max(dim=1)
        self.seen = self.seen + mixed.detach().mean(0)
        return values.square().mean() + wide.unbind(1)[3].cos().sum(), picked[:, ::2]


class Slices(nn.Module):
    """Values with gaps in larger storages: slices that are written to, and spectra."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        wide = h.new_empty(len(h), 3, 16)
        for i in range(3):
            wide[:, i] = h * (i + 1)
        wide[:, 1:, ::3].mul_(h[:, None, ::3]).tanh_()
        heard = torch.fft.irfft(torch.fft.rfft(wide.sin()), n=16)
        return (heard * wide.exp()).square().mean()


class Bank(nn.Module):
    """A model that writes to buffers in place: to a slice that forward and backward read later, and to a whole one."""

    bank: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("bank", torch.randn(16, 96))
        self.register_buffer("mean", torch.zeros(40, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        near = (y @ self.bank[:, 8:16].clone()).exp()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y, alpha=0.1)
            self.bank[:, :8] = y[:8].t()
            self.bank[2:4, ::3].sigmoid_()
        far = self.second((y - self.mean).sin()) @ self.bank[:, :8]
        return (near * far).square().mean()


def text() -> dict[str, Tensor]:
    ids = torch.randint(1, 40, (2, 12))
    return {"input_ids": ids, "labels": ids}


GPT2 = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "use_cache": False}


class Skips(nn.Module):
    """Layers with skip connections; two of them share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        return (self.third(F.gelu(self.second(h)) + h) + x).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "normed": (Normed, lambda: ((torch.randn(24, 16),), {})),
    "attention": (Attention, lambda: ((torch.randint(32, (2, 10)),), {})),
    "pictures": (Pictures, lambda: ((torch.randn(3, 3, 10, 10),), {})),
    "gpt2": (partial(nets.gpt2, **GPT2), lambda: ((), text())),
    "slices": (Slices, lambda: ((torch.randn(40, 16),), {})),
    "views": (Views, lambda: ((torch.randn(6, 12, requires_grad=True),), {})),
    "bank": (Bank, lambda: ((torch.randn(40, 16),), {})),
    "parts": (lambda: MicroBatches(Skips(), 3, "mean"), lambda: ((torch.randn(8, 16),), {})),
}


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, a call of it, and the captured step."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    captured: Captured
    graphs: tuple[fx.Graph, fx.Graph]  # without and with gradients to add to
    begin: dict[str, Tensor]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return operands(self.model, self.args, self.kwargs)

    def again(self) -> None:
        """Restore the state before the first step."""
        for name, parameter in self.model.named_parameters():
            parameter.data = self.begin[name].clone()  # on the device, wherever the plan before had it
        self.model.load_state_dict(self.begin)
        for tensor in self.tensors:
            tensor.grad = None
        torch.manual_seed(1)

    def facts(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return all that must be equal after a step."""
        grads = [tensor.grad for tensor in self.tensors if tensor.grad is not None]
        state = [*self.model.buffers(), *self.model.parameters(), torch.get_rng_state()]
        return [tensor.detach().clone() for tensor in (*outputs, *grads, *state)]


@cache
def subject(name: str) -> Subject:
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model = make()
    args, kwargs = batch()
    captured = capture(model, args, kwargs, wanted=select_losses)
    graphs = corrected(captured, adds=False), corrected(captured, adds=True)
    begin = {key: value.clone() for key, value in model.state_dict().items()}
    return Subject(model, args, kwargs, captured, graphs, begin)


def corrected(captured: Captured, adds: bool) -> fx.Graph:
    """Return the graph of a step that makes gradients or `adds` to them, with measured layouts."""
    graph = accumulate_grads(captured, hooked=()) if adds else captured.graph.graph
    apply_profiled_layouts(graph, PROBER.layouts)
    return graph


def price(node: fx.Node) -> Cost:
    """Return the measured workspace, and a time that is the same in every run."""
    cost = OpProfiler(1 << 40)(node)
    return Cost(5.0, cost.workspace) if cost.us else cost


@cache
def traced(name: str, adds: bool) -> Trace:
    return order_by_section(summarize(subject(name).graphs[adds], price), Machine(0))


@cache
def eager(name: str, times: int) -> list[Tensor]:
    its = subject(name)
    its.again()
    outputs: list[Tensor] = []
    for _ in range(times):
        result = its.model(*its.args, **its.kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        outputs[0].backward()
    return its.facts(outputs)
