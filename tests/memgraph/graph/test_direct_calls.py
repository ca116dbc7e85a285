"""The code of a half runs the ops of its nodes, whatever functions it calls them by."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memgraph.graph.halves import direct_calls
from memgraph.graph.halves.direct_calls import DirectCode, direct_call
from memgraph.graph.halves.partition import partition
from memgraph.graph.ops import RUN
from tests.support.law_models import MODELS, subject

aten = torch.ops.aten


class Noting(TorchDispatchMode):
    """Notes each op, the numbers that it is given, and the layouts of its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        said = tree_map_only(Tensor, lambda x: (x.dtype, x.shape, x.stride()), (args, kwargs or {}))
        self.calls.append(f"{op} {said}")
        return op(*args, **(kwargs or {}))


def run(half: fx.GraphModule, values: list[Any]) -> tuple[list[str], list[Any]]:
    torch.manual_seed(3)
    given = tree_map_only(Tensor, lambda x: x.detach().clone(), values)
    with torch.no_grad(), torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd(), Noting() as noted:
        return noted.calls, list(half.forward(given))


def tensors(values: list[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def by_ops(half: fx.GraphModule, patch: pytest.MonkeyPatch) -> fx.GraphModule:
    """Return the half with code that calls each op by its own object."""
    graph = fx.Graph()
    graph.set_codegen(DirectCode())
    graph.output(graph.graph_copy(half.graph, {}))
    with patch.context() as patched:
        patched.setattr(direct_calls, "_functions", lambda node: iter(()))
        patched.setattr(direct_calls, "_found", {})
        return fx.GraphModule(half, graph)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_half_runs_the_very_ops_of_its_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    its = subject(name)
    halves = partition(its.graphs[0], its.captured.graph)
    assert halves.backward is not None
    values: list[Any] = list(its.tensors)
    for half in (halves.forward, halves.backward):
        plain = by_ops(half, monkeypatch)
        (calls, results), (expected, wanted) = run(half, values), run(plain, values)
        assert calls == expected
        assert all(map(torch.equal, tensors(results), tensors(wanted)))
        outputs = sum(role.kind == "output" for role in its.captured.outputs)
        values = [*results[outputs:], *(torch.ones(x.shape, dtype=x.dtype) for x in halves.tangents)]


def node_of(target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    """Return a node; tensors among its arguments are those of other nodes."""
    graph = fx.Graph()

    def placed(value: Tensor) -> fx.Node:
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = value
        return node

    given, named = tree_map_only(Tensor, placed, (args, kwargs))
    node = graph.call_function(target, given, named)
    node.meta["val"] = target(*args, **kwargs)
    return node


X, NUMBER = torch.ones(2, 3), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("target", "args", "function"),
    [
        (aten.add.Tensor, (X, X), torch.add),
        (aten.mul.Tensor, (X, 0.5), torch.mul),
        (aten.view.default, (X, [6]), torch.Tensor.view),
        (aten.gelu.default, (X,), torch.nn.functional.gelu),
        (aten.cat.default, ([X, X], 1), torch.cat),
        (aten.add_.Tensor, (X.clone(), X), torch.Tensor.add_),
    ],
)
def test_an_op_is_called_by_torchs_own_function(target: OpOverload, args: Any, function: Any) -> None:
    assert direct_call(node_of(target, *args)) == function


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.mul.Scalar, (X, 0.5)),  # torch.mul calls mul.Tensor
        (aten.tanh_backward.default, (X, X)),  # no function
        (aten.pow.Tensor_Tensor, (X, NUMBER)),  # a tensor that may be taken for a number
        (aten.ones.default, ([2, 3],)),  # a default device would be asked
    ],
)
def test_what_no_function_does_the_op_does(target: OpOverload, args: Any) -> None:
    assert direct_call(node_of(target, *args)) == target._op


def test_a_function_is_not_taken_if_it_changes_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    node = node_of(aten.sum.dim_IntList, X, [0], True)
    monkeypatch.setattr(direct_calls, "_found", {})
    monkeypatch.setattr(direct_calls, "COMPILED", (type(lambda: None),))
    monkeypatch.setattr(direct_calls, "PLACES", (Keeping,))
    assert direct_call(node) == aten.sum.dim_IntList._op


class Keeping:
    @staticmethod
    def sum(x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
        return torch.sum(x, dim, not keepdim)


def test_memory_ops_are_called_without_torchs_dispatcher() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert direct_call(graph.call_function(torch.ops.memgraph.offload.default, (x, 0))) is RUN["offload"]


def test_the_code_names_what_it_calls() -> None:
    graph = fx.Graph()
    graph.set_codegen(DirectCode())
    x = graph.placeholder("x")
    x.meta["val"] = X
    total = graph.call_function(aten.mul.Tensor, (x, x))
    half = graph.call_function(aten.mul.Tensor, (total, 0.5))
    total.meta["val"] = half.meta["val"] = X
    graph.output((half,))
    module = fx.GraphModule({}, graph)
    assert module.code.count("op_aten_mul_Tensor(") == 2
    (result,) = module.forward([X * 3])
    assert tree_leaves(result)[0].equal(X * 4.5)


def test_a_function_that_is_tried_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_calls, "_found", {})
    graph = fx.Graph()
    node = graph.call_function(aten.add.Scalar, (graph.placeholder("x"), 2, 3))
    node.args[0].meta["val"] = node.meta["val"] = torch.ones(3)  # type: ignore[union-attr]
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert direct_call(node)(torch.ones(3), 2, 3).tolist() == [7.0] * 3
        assert not said
    finally:
        torch.set_warn_always(before)
