"""The stages of a step, run one after the other in one process: gradients are those of the plain model, to the bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memgraph.capture.capture import capture, operands
from memgraph.graph.captured import Captured
from memgraph.graph.gradient_sums import gradient_sums
from memgraph.graph.halves.partition import Partition, partition
from memgraph.graph.nodes import returned_values
from memgraph.graph.summarize import Cost, summarize
from memgraph.stages.stage_planner import stage_graph
from memgraph.tensors.loss_outputs import select_losses
from passes import Op, Trace, check
from passes.ir.liveness import RELEASED
from passes.stages.cut import best_cut
from passes.stages.interval_costs import IntervalCosts
from passes.stages.places import Places
from passes.stages.stage_trace import stage_trace
from tests.support.models import gpt2, t5


class Skips(nn.Module):
    """A U-Net in small: the first results are read again by the last layers, a mask that is made early is used late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        kept, mask = [], x > 0
        for layer in self.layers[:3]:
            x = layer(x).tanh()
            kept.append(x)
        x = self.norm(x)
        for layer in self.layers[3:]:
            x = layer(x + kept.pop()).relu()
        return (torch.where(mask, x, 0.5 * x) - target).square().mean()


class Frozen(nn.Module):
    """The first layers need no gradient; integers and a list of two tensors cross."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8).requires_grad_(False)
        self.first, self.last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        shifted = ids.roll(1, -1)
        low, high = self.first(self.table(ids)).chunk(2, -1)
        x = self.last(torch.cat([high.sin(), low], -1))
        return nn.functional.cross_entropy(x.flatten(0, 1), shifted.flatten())


def language(make: Any) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    ids = torch.randint(0, 64, (2, 8))
    return make, (), {"input_ids": ids, "labels": ids}


NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
CASES: dict[str, Any] = {
    "skips": lambda: (Skips(), (torch.randn(4, 8), torch.randn(4, 8)), {}),
    "frozen": lambda: (Frozen(), (torch.randint(0, 16, (2, 5)),), {}),
    "gpt2": lambda: language(gpt2(n_layer=3, n_embd=16, n_head=2, vocab_size=64, n_positions=8, **NO_DROPOUT)),
    "t5": lambda: language(t5(num_layers=2, d_model=16, d_ff=32, d_kv=8, num_heads=2, vocab_size=64, dropout_rate=0.0)),
}


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_stages_make_the_gradients_of_the_whole(name: str, count: int) -> None:
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    model.train()
    captured = capture(model, args, kwargs, wanted=select_losses)
    costs = IntervalCosts(Places(summarize(captured.graph.graph, lambda node: Cost(1.0)), gradient_sums(captured)))
    cut = best_cut(costs, [math.inf] * count, [1] * count)
    traces = [stage_trace(costs.places, stage.begin, stage.end) for stage in cut.stages]
    found = run(captured, traces, model, args, kwargs)
    eager = copy.deepcopy(model)
    result = eager(*args, **kwargs)
    (result if isinstance(result, Tensor) else result.loss).backward()
    tied = {role.name for role in captured.outputs if role.kind == "gradient" and _is_sum(captured, costs, role.name)}
    assert {key for key, value in eager.named_parameters() if value.grad is not None} == set(found)
    for key, value in eager.named_parameters():
        if value.grad is None:
            continue
        if key in tied:
            torch.testing.assert_close(found[key], value.grad)
        else:
            assert torch.equal(found[key], value.grad), key


def test_the_summary_of_a_stage_is_its_trace() -> None:
    captured = capture(Skips(), (torch.randn(4, 8), torch.randn(4, 8)), {}, wanted=select_losses)
    costs = IntervalCosts(Places(summarize(captured.graph.graph, lambda node: Cost(1.0))))
    for stage in best_cut(costs, [math.inf] * 3, [1] * 3).stages:
        trace = stage_trace(costs.places, stage.begin, stage.end)
        again = summarize(stage_graph(captured.graph.graph, trace), lambda node: Cost(1.0))
        check(again)
        assert again.outputs == trace.outputs
        assert [(op.name, op.fn, op.reads, op.nbytes, op.phase) for op in again.ops] == [
            (op.name, op.fn, op.reads, op.nbytes, op.phase) for op in trace.ops
        ]


def run(
    captured: Captured, traces: list[Trace], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """Run forward of all stages, and their backward from the last to the first; return the gradients of parameters."""
    graph = captured.graph.graph
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    values = dict(zip(names, (tensor.detach() for tensor in operands(model, args, kwargs)), strict=False))
    values |= {
        name: torch.ones(()) for name, role in zip(names, captured.inputs, strict=True) if role.kind == "tangent"
    }
    stages = [(trace, partition(stage_graph(graph, trace), captured.graph)) for trace in traces]
    saved = [run_forward(trace, halves, values) for trace, halves in stages]
    for (trace, halves), kept in zip(reversed(stages), reversed(saved), strict=True):
        run_backward(trace, halves, kept, values)
    roles = zip(captured.outputs, returned_values(graph), strict=True)
    return {role.name: total(node, values) for role, node in roles if role.kind == "gradient"}


def run_forward(trace: Trace, halves: Partition, values: dict[str, Tensor]) -> list[Tensor]:
    inputs = [value_of(values, op) for op in trace.ops if op.is_input and op.name in values and op.fn != "tangent"]
    returned = list(halves.forward(inputs))
    outputs = [value for kind, value in trace.outputs if kind in ("output", RELEASED)]
    values |= dict(zip(outputs, returned, strict=False))
    return returned[len(outputs) :]


def run_backward(trace: Trace, halves: Partition, saved: list[Tensor], values: dict[str, Tensor]) -> None:
    if halves.backward is not None:
        tangents = [value_of(values, op) for op in trace.ops if op.fn == "tangent"]
        gradients = [value for kind, value in trace.outputs if kind not in ("output", RELEASED)]
        values |= dict(zip(gradients, halves.backward([*saved, *tangents]), strict=True))


def value_of(values: Mapping[str, Tensor], op: Op) -> Tensor:
    """Return a parameter itself, and a copy of what would be sent: a stage may write into it."""
    return values[op.name] if op.fn in ("parameter", "buffer") else values[op.name].clone()


def total(node: Any, values: Mapping[str, Tensor]) -> Tensor:
    """Return a gradient, or the sum of its parts."""
    if node.name in values:
        return values[node.name]
    first, second = (total(term, values) for term in node.all_input_nodes)
    return first + second


def _is_sum(captured: Captured, costs: IntervalCosts, name: str) -> bool:
    roles = zip(captured.outputs, returned_values(captured.graph.graph), strict=True)
    return any(role.name == name and node.name in costs.places.sums for role, node in roles if role.kind == "gradient")
