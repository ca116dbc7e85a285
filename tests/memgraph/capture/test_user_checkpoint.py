"""Where eager takes torch's fused layers, so does the step: bit for bit the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.compare import ROOM

X = torch.linspace(-2, 2, 8 * 16 * 32).sin().view(8, 16, 32)
PADDING = torch.arange(16).expand(8, 16) > 11
CAUSAL = nn.Transformer.generate_square_subsequent_mask(16)


def layer(**kwargs: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **kwargs)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)


def attention() -> nn.Module:
    torch.manual_seed(0)
    return nn.MultiheadAttention(32, 4, batch_first=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "args", "kwargs"),
    [
        (layer(), (X,), {}),
        (layer(activation="gelu", norm_first=True), (X,), {"src_key_padding_mask": PADDING}),
        (encoder(), (X,), {}),
        (encoder(), (X,), {"src_key_padding_mask": PADDING}),
        (encoder(), (X,), {"mask": CAUSAL, "is_causal": True}),
        (attention(), (X, X, X), {}),
        (attention(), (X, X, X), {"key_padding_mask": PADDING, "need_weights": False}),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_layer_runs_the_kernels_that_eager_runs(module: nn.Module, args: Any, kwargs: Any, grad: bool) -> None:
    module = module.eval()
    twin = copy.deepcopy(module)
    with torch.set_grad_enabled(grad):
        found, expected = memgraph.compile(module, ROOM)(*args, **kwargs), twin(*args, **kwargs)
    pairs = zip(*(result if isinstance(result, tuple) else (result,) for result in (found, expected)), strict=True)
    for one, other in pairs:
        assert (one is other is None) or torch.equal(one, other)
    if grad:
        for result in (found, expected):
            (result[0] if isinstance(result, tuple) else result).sum().backward()
        for p, q in zip(module.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert torch.equal(p.grad, q.grad)


class Twice(nn.Module):
    """A module that computes differently for one tensor and for two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        h = self.linear(a) * b.sin() + c.exp() * a
        return h if a is b else h * 2


@pytest.mark.long
@pytest.mark.parametrize("same", ["aaa", "aab", "aba", "abc", "aaa"])
def test_one_tensor_that_is_given_twice_is_one_input(same: str) -> None:
    module, results = Twice(), []
    compiled = memgraph.compile(module, ROOM)
    compiled(*(torch.ones(2, 4) for _ in range(3)))
    for model in (compiled, module):
        held = {name: torch.linspace(-1, 1, 8).view(2, 4).requires_grad_() for name in "abc"}
        module.zero_grad()
        out = model(*(held[name] for name in same))
        out.sum().backward()
        results.append([out, *(held[name].grad for name in sorted(set(same))), module.linear.weight.grad])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


class Values(nn.Module):
    """Singular values and eigenvalues of what needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (
            self.layer(x),
            torch.linalg.svdvals(x),
            torch.linalg.eigvalsh(x.mT @ x),
            torch.linalg.eigvalsh(x, UPLO="U"),
        )


@pytest.mark.parametrize("needs", [False, True])
def test_singular_values_are_computed_without_vectors_where_eager_needs_none(needs: bool) -> None:
    torch.manual_seed(0)
    module = Values()
    x = torch.randn(6, 16, 16).requires_grad_(needs)
    pairs = list(zip(memgraph.compile(copy.deepcopy(module), ROOM)(x), module(x), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)


class Casting(nn.Module):
    """Casts a layer in each call, as the routers of Switch Transformers do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(32, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.layer.to(self.dtype)
        y: Tensor = self.layer(x.to(self.dtype))
        return y


def test_a_cast_that_changes_nothing_is_nothing() -> None:
    model = Casting(torch.float32)
    assert torch.equal(memgraph.compile(model, ROOM)(X), model(X))


class Criterion(nn.Module):
    """Weights that a detector makes and moves in each forward, as those of transformers do."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        weights = torch.ones(4)
        weights[-1] = 0.1
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weights).square().mean()


class Detector(nn.Module):
    """Casts a criterion that is new in each call, or one that stays."""

    def __init__(self, stays: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.criterion = nn.Linear(32, 4), Criterion() if stays else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.criterion or Criterion()).to(torch.float64)(self.layer(x))
        return y


def test_a_module_that_is_made_in_forward_may_be_cast_in_each() -> None:
    plain, model = Detector(stays=False), Detector(stays=False)
    called = memgraph.compile(model, ROOM)
    for x in (X, X + 1):
        losses = [each(x) for each in (plain, called)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses) and losses[1].dtype == torch.float64
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))  # type: ignore[arg-type]


def test_buffers_of_the_model_are_not_cast_in_forward() -> None:
    with pytest.raises(memgraph.CaptureError, match="casts or moves the parameters of a Criterion"):
        memgraph.compile(Detector(stays=True), ROOM)(X)


def test_a_cast_of_parameters_in_forward_is_refused_by_what_is_cast() -> None:
    with pytest.raises(
        memgraph.CaptureError, match=r"casts or moves the parameters of a Linear.*run the plain module once"
    ):
        memgraph.compile(Casting(torch.float64), ROOM)(X)
