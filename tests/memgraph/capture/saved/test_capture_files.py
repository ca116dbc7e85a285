"""A capture of an earlier process is used where a new one would be the same graph, and nowhere else."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from memgraph.capture import trace_call
from memgraph.capture.call.call import Call
from memgraph.capture.capture import capture
from memgraph.capture.joint.trace_joint import trace_joint
from memgraph.capture.saved import capture_files
from memgraph.capture.saved.capture_files import FILE
from memgraph.graph.captured import Captured
from memgraph.system import fake_log, measurement_cache
from memgraph.system.measurement_cache import CostDatabase
from memgraph.tensors.loss_outputs import select_all
from tests.support.captured_calls import X, agrees
from tests.support.random_modules import random_module

SCALE = 11.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for this test."""
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(measurement_cache, "_open", {})
    return tmp_path


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One item for each call that was traced into a graph."""
    found: list[object] = []
    trace = trace_joint

    def counted(*given: Any) -> object:
        found.append(given)
        return trace(*given)

    monkeypatch.setattr(trace_call, "trace_joint", counted)
    return found


class Net(nn.Module):
    """Parameters, buffers, dropout, writes in place, and a tensor made in forward."""

    def __init__(self, scale: float = 3.0) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(4, 4), nn.BatchNorm1d(4), scale

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.norm(self.linear(x)).relu_(), 0.5, self.training)
        return (h * torch.tensor([1.0, 2.0, 3.0, 4.0]) * self.scale).sum()


def net(scale: float = 3.0) -> Net:
    torch.manual_seed(0)
    return Net(scale)


class Attributes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.width = x.shape[-1]
        return x.square().sum()


class Positions(nn.Module):
    """Python looks at a value that no input affects."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[-1]) + 1
        return (x * positions).sum() if (positions.diff() == 1).all() else x.sum()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Any = checkpoint(self.linear, x, use_reentrant=False)
        return h.tanh().sum()


class Twice(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * Twice.factor


def called(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A module of one weight whose forward calls a function."""

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return function(x * self.weight).sum()

    return Called()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "net": net, "eval": lambda: net().eval(), "attributes": Attributes, "positions": Positions,
    "checkpointed": Checkpointed, "function": lambda: called(Twice.apply), "lstm": lambda: nn.LSTM(4, 4, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_what_is_read_computes_as_eager_does(name: str, traces: list[object]) -> None:
    x = X.clone().requires_grad_()
    first = agrees(MODULES[name](), x)
    second = agrees(MODULES[name](), x)
    assert len(traces) == 1
    assert described(first) == described(second)


class Windows(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x.unfold(0, self.size, 1).square().sum()


def test_an_op_that_fails_where_an_earlier_capture_is_looked_for_is_not_in_torchs_log(
    caplog: pytest.LogCaptureFixture, traces: list[object]
) -> None:
    capture(Windows(2), (X,), {})
    with pytest.raises(RuntimeError, match="dimension 0 is 2 but size is 8"):
        capture(Windows(8), (X,), {})
    assert len(traces) == 2
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    with pytest.raises(RuntimeError), FakeTensorMode():
        torch.ones(2).unfold(0, 8, 1)
    assert [record.name for record in caplog.records if record.levelno >= logging.ERROR] == [fake_log.LOG.name]


def test_an_op_without_a_result_is_kept(traces: list[object]) -> None:
    solving = called(lambda x: torch.linalg.solve(torch.eye(4) + x.T @ x, x.T))
    first, second = (capture(solving, (X,), {}) for _ in range(2))
    assert len(traces) == 1
    assert described(first) == described(second)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_read_is_what_would_be_traced(seed: int, traces: list[object]) -> None:
    module, inputs = random_module(seed).made()
    first, second = (capture(module, (inputs[0],), {}) for _ in range(2))
    assert len(traces) == 1
    assert described(first) == described(second)


def described(captured: Captured) -> list[object]:
    """All facts of a capture but real tensors, with storages by number."""
    numbers: dict[int, int] = {}

    def value(thing: Any) -> object:
        if not isinstance(thing, Tensor):
            return thing
        storage = thing.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(numbers)), storage.nbytes(), thing.storage_offset()
        return number, thing.dtype, thing.shape, thing.stride(), thing.device, thing.requires_grad

    nodes = []
    for node in captured.graph.graph.nodes:
        facts = {"kinds": node.meta["kinds"]} if node.op == "output" else node.meta
        meta = {name: tree_map(value, fact) for name, fact in facts.items()}
        nodes.append((node.op, node.name, str(node.target), repr(node.args), repr(node.kwargs), meta))
    roles = captured.inputs, captured.outputs, captured.spec, captured.differentiable, captured.tangents
    rest = dict(captured.sources), captured.has_custom_functions, dict(captured.rewritten), captured.speculative_outputs
    return [nodes, *roles, *rest]


def gradient(module: nn.Module) -> Tensor:
    """The gradient of the input, by the captured graph, compared with eager's."""
    x = X.clone().requires_grad_()
    agrees(module, x)
    (result,) = torch.autograd.grad(module(x), x)
    return result


def test_a_changed_global_attribute_or_closure_is_captured(
    traces: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    factor = {0: 5.0}
    functions = (lambda x: x * SCALE, lambda x: x * factor[0], lambda x: x * Twice.factor)
    for function, value in zip(functions, (7.0, 8.0, 9.0), strict=True):
        traces.clear()
        before = gradient(called(function))
        assert torch.equal(gradient(called(function)), before) and len(traces) == 1
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "SCALE", value)
            patch.setitem(factor, 0, value)
            patch.setattr(Twice, "factor", value)
            assert torch.equal(gradient(called(function)), torch.full_like(before, value))
        assert len(traces) == 2


def test_a_changed_forward_backward_or_library_is_captured(
    traces: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tripled(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3

    first = gradient(called(Twice.apply))
    monkeypatch.setattr(Twice, "backward", staticmethod(tripled))
    assert torch.equal(gradient(called(Twice.apply)), 1.5 * first)
    monkeypatch.setattr(Net, "forward", lambda self, x: self.linear(x).sum())
    gradient(net())
    monkeypatch.setattr(F, "linear", lambda x, weight, bias: x @ weight.t() * 2 + bias)
    gradient(net())
    assert len(traces) == 4


def test_another_data_flow_of_the_same_ops_is_captured(traces: list[object]) -> None:
    def crossed(x: Tensor) -> Tensor:
        y, z = x.sin(), x.cos()
        return y - z

    def swapped(x: Tensor) -> Tensor:
        y, z = x.sin(), x.cos()
        return z - y

    def replaced(x: Tensor) -> Tensor:
        y, _ = x.sin(), x.cos()
        return y - y

    for function in (crossed, swapped, replaced):
        gradient(called(function))
    assert len(traces) == 3


def test_a_hook_inside_of_forward_is_captured(traces: list[object]) -> None:
    def hooked(x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad and factor[0]:
            y.register_hook(lambda gradient: gradient * factor[0])
        return y

    factor = [0.0]
    first = gradient(called(hooked))
    factor[0] = 3.0
    assert torch.equal(gradient(called(hooked)), 3 * first)
    assert len(traces) == 2


def test_other_options_layouts_and_versions_are_captured(traces: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    def of(module: nn.Module, x: Tensor, **given: Any) -> int:
        before = len(traces)
        capture(module, (x,), {}, **given)
        return len(traces) - before

    x = torch.ones(2, 4)
    assert [of(net(), x), of(net(), x)] == [1, 0]
    assert [of(net(4.0), x), of(net(), x)] == [1, 0]
    assert of(net().eval(), x) == of(net(), torch.ones(4, 2).t()) == of(net(), torch.ones(3, 4)) == 1
    assert of(net(), x.clone().requires_grad_()) == of(net(), x, grad=False) == of(net(), x, wanted=lambda _: ()) == 1
    monkeypatch.setattr(capture_files, "_versions", lambda: ("another torch",))
    assert [of(net(), x), of(net(), x)] == [1, 0]


def test_a_tensor_that_forward_reads_is_that_of_this_process(traces: list[object]) -> None:
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    module: Any = called(lambda x: x * module.mask)
    module.mask = mask.clone()
    agrees(module, X)
    module.mask = mask.clone()
    captured = agrees(module, X)
    assert len(traces) == 1
    (node,) = captured.graph.graph.find_nodes(op="get_attr")
    assert getattr(captured.graph, node.target) is module.mask


def test_values_that_only_eager_may_look_at_are_captured(traces: list[object]) -> None:
    """Python's branch on a tensor of constants is the same, or the digest is another."""
    limit = [3]

    def branches(x: Tensor) -> Tensor:
        return x * 2 if torch.arange(limit[0]).sum() == 3 else x * 4

    first = gradient(called(branches))
    assert torch.equal(gradient(called(branches)), first) and len(traces) == 1
    limit[0] = 5
    assert torch.equal(gradient(called(branches)), 2 * first) and len(traces) == 2


def test_a_damaged_file_is_replaced_with_a_warning(folder: Path, traces: list[object]) -> None:
    capture(net(), (X,), {})
    (folder / FILE).write_bytes(os.urandom(5000))
    with pytest.warns(RuntimeWarning, match="can't be read"):
        agrees(net(), X)
    agrees(net(), X)
    assert len(traces) == 2


@pytest.mark.parametrize("change", ["cut", "text", "another op", "no constant", "number"])
def test_a_damaged_capture_is_captured(change: str, folder: Path, traces: list[object]) -> None:
    capture(net(), (X,), {})
    with sqlite3.connect(folder / FILE) as file:
        rows = file.execute("SELECT key, value FROM costs").fetchall()
    (key,) = (key for key, value in rows if value != "true")
    packed = json.loads(dict(rows)[key])
    record: Any = capture_files.unpacked(packed)
    if change == "another op":
        record["nodes"][-2][2] = "aten::no_such_op.default"
    elif change == "no constant":
        record["constants"] = {}
    elif change == "number":
        record["nodes"][-2][3] = [{"node": 100_000}]
    replacement: Any = {"cut": packed[: len(packed) // 2], "text": 7}.get(change, capture_files.packed(record))
    measurement_cache.write_cached(key, replacement, FILE)
    agrees(net(), X)
    assert len(traces) == 2


def test_a_row_with_other_bytes_is_not_read(folder: Path, traces: list[object]) -> None:
    capture(net(), (X,), {})
    with sqlite3.connect(folder / FILE) as file:
        file.execute("UPDATE costs SET value = replace(value, 'A', 'B')")
    with pytest.warns(RuntimeWarning, match="damaged"):
        agrees(net(), X)
    assert len(traces) == 2


def test_the_file_stays_below_its_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_files, "DISK_NBYTES", 16 << 10)
    monkeypatch.setattr(capture_files, "LARGEST", 1)
    for rows in range(2, 10):
        capture(net(), (torch.ones(rows, 4),), {}, wanted=select_all)
    assert 0 < len(keys()) < 16
    assert (folder / FILE).stat().st_size <= 32 << 10
    monkeypatch.setattr(capture_files, "DISK_NBYTES", 100)  # one is larger than its share
    capture(net(), (torch.ones(99, 4),), {})
    assert capture_files.find_capture(*asked(net(), torch.ones(99, 4))) is None


def asked(module: nn.Module, x: Tensor) -> Any:
    call = Call.of(module, (x,), {})
    return capture_files.call_kind(call, True, select_all), call, True, select_all


def test_threads_write_and_read_at_once(traces: list[object]) -> None:
    modules = [net(scale) for scale in (1.0, 2.0, 3.0, 4.0)]
    records = [described(capture(module, (X,), {})) for module in modules]
    (kind,) = {asked(module, X)[0] for module in modules}
    content = {key: measurement_cache.read_cached(key, FILE) for key in keys()}

    def rewrite(key: str) -> bool:
        for _ in range(10):
            CostDatabase(measurement_cache._costs(FILE).path).put(key, content[key])  # type: ignore[union-attr]
            if measurement_cache.read_cached(key, FILE) != content[key]:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(rewrite, [*content, *content]))
    assert kind in content and len(content) == 5
    assert [described(capture(module, (X,), {})) for module in modules] == records and len(traces) == 4


def keys() -> list[str]:
    with sqlite3.connect(Path(os.environ["MEMGRAPH_CACHE"]) / FILE) as file:
        return [key for (key,) in file.execute("SELECT key FROM costs")]


@pytest.mark.parametrize("variable", [("MEMGRAPH_CAPTURE_CACHE", "0"), ("MEMGRAPH_CACHE", "")])
def test_it_can_be_turned_off(
    variable: tuple[str, str], folder: Path, traces: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(net(), (X,), {})
    monkeypatch.setenv(*variable)
    capture(net(), (X,), {})
    assert len(traces) == 2
    (folder / FILE).unlink()
    capture(net(), (X,), {})
    assert not (folder / FILE).exists()


def test_an_op_without_a_text_is_no_key(traces: list[object]) -> None:
    generator = torch.Generator()
    module = called(lambda x: x * torch.rand(4, generator=generator))
    for _ in range(2):
        capture(module, (X,), {})
    assert len(traces) == 2


def test_forward_fails_as_before() -> None:
    def fails(x: Tensor) -> Tensor:
        if state.broken:
            raise KeyError("mine")
        return x

    state = SimpleNamespace(broken=False)
    capture(called(fails), (X,), {})
    state.broken = True
    with pytest.raises(KeyError, match="mine"):
        capture(called(fails), (X,), {})
