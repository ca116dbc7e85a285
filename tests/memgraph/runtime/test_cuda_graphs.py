"""A step that is recorded and replayed is eager's to the bit, however late the streams are, and its memory is its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
import passes
from memgraph.planning import assembly, replan, search, target
from memgraph.runtime import cuda_graphs, step
from memgraph.runtime.cuda_graphs import CudaGraphPair
from memgraph.storage.pinned_pool import PinnedPool
from memgraph.storage.pinned_tier import PinnedLease, PinnedTier
from passes.schedule.schedule import Placement
from tests.support.forced_plans import all_given_up, given_up
from tests.support.late_cuda_graphs import Tapes
from tests.support.late_device import Late, Pinned

CPU = torch.device("cpu")
SEEDS = range(5)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48), nn.GELU()) for _ in range(2))
        self.register_buffer("count", torch.zeros(48))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        self.count.add_(x.detach().mean(0))
        return x.square().mean()


class Device:
    """A late device, with the recorders that were made for it."""

    def __init__(self) -> None:
        self.late = Late(0)
        self.pool = PinnedPool(lambda: 1 << 30, Pinned())
        self.tapes: list[Tapes] = []

    def recorder(self) -> Tapes:
        self.tapes.append(Tapes(self.late))
        return self.tapes[-1]

    def tier(self, device: torch.device, slots: Sequence[int], *_: Any) -> PinnedTier | None:
        return PinnedTier(slots, device, self.late, self.pool) if slots else None


@pytest.fixture(name="device")
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(replan, "replanned", lambda *_: None)
    monkeypatch.setattr(target, "recorder_of", lambda _: device.recorder)
    monkeypatch.setattr(assembly, "open_tier", device.tier)
    monkeypatch.setattr(search, "make_plan", given_up(Placement.OFFLOAD_BLOCKING))
    yield device
    device.late.finish()


def batch(turn: int, rows: int = 100) -> Tensor:
    return torch.randn(rows, 48, generator=torch.Generator().manual_seed(turn))


def facts(model: nn.Module, called: Any, x: Tensor) -> list[Tensor]:
    """Loss, gradients and buffers of a step."""
    model.zero_grad(set_to_none=True)
    loss = called(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), *model.buffers()]


class Pair:
    """A plain model and a compiled one, which do the same."""

    def __init__(self, **options: Any) -> None:
        self.plain, self.model = Layers(), Layers()
        given: dict[str, Any] = {"cuda_graphs": True} | options
        self.ours = memgraph.compile(self.model, "1GB", **given)

    def same(self, turn: int, rows: int = 100) -> bool:
        found = facts(self.model, self.ours, batch(turn, rows))
        expected = facts(self.plain, self.plain, batch(turn, rows))
        return len(found) == len(expected) and all(map(torch.equal, found, expected))

    def begin(self) -> Pair:
        """The two steps that run op by op."""
        assert self.same(0) and self.same(1)
        self.model.zero_grad(set_to_none=True)
        return self


@pytest.mark.parametrize("plan", [given_up(Placement.OFFLOAD_BLOCKING), all_given_up], ids=["offload", "mixed"])
def test_replays_are_eager_to_the_bit_however_late_the_streams_are(
    plan: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "make_plan", plan)
    pair = Pair().begin()
    for seed in SEEDS:
        device.late.seed(seed)
        with device.late.noting():
            found = facts(pair.model, pair.ours, batch(seed))
        assert all(map(torch.equal, found, facts(pair.plain, pair.plain, batch(seed))))
    assert len(device.tapes) == 1  # recorded once, forward and then backward
    assert len(device.tapes[0].lines) == 2 and min(device.tapes[0].lines) > 20
    assert "recorded from its third run on" in str(pair.ours.plan)
    report = pair.ours.plan
    assert report.measured is not None and report.measured <= report.peak <= report.budget


@pytest.mark.usefixtures("device")
def test_without_its_end_being_waited_for_a_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA does: copies that forward has begun are waited for in backward, by events of another recording."""
    monkeypatch.setattr(PinnedLease, "join", lambda lease: lease.last.clear())
    pair = Pair().begin()
    with pytest.raises(AssertionError, match="recording"):
        pair.same(2)


@pytest.mark.parametrize("deaf", [frozenset(), frozenset({("other", "compute")})], ids=["waits", "deaf"])
def test_a_step_on_another_stream_comes_behind_the_last(deaf: frozenset[tuple[str, str]], device: Device) -> None:
    device.late.deaf = deaf
    _, _, other = (device.late.Stream(CPU) for _ in range(3))  # the first two are those of copies
    model = Layers()
    ours = memgraph.compile(model, "1GB", cuda_graphs=True)
    given = [batch(turn) for turn in range(2)]
    expected = [Layers()(x) for x in given]
    equal = True
    with torch.no_grad():
        for turn in range(2):
            ours(given[turn])
        for seed in range(24):
            device.late.seed(seed)
            with device.late.noting():
                first = ours(given[0])
                with device.late.stream(other):
                    second = ours(given[1])
            equal &= torch.equal(first, expected[0]) and torch.equal(second, expected[1])
    assert equal == (not deaf)


def test_an_output_keeps_its_values_when_the_step_runs_again(device: Device) -> None:
    pair = Pair().begin()
    losses = [pair.ours(batch(turn)) for turn in range(2)]  # and two runs at once
    expected = [pair.plain(batch(turn)) for turn in range(2)]
    for ours, theirs in zip(losses, expected, strict=True):
        pair.model.zero_grad(set_to_none=True)
        pair.plain.zero_grad(set_to_none=True)
        ours.backward()
        theirs.backward()
        assert torch.equal(ours, theirs)
        found, wanted = ([p.grad for p in m.parameters() if p.grad is not None] for m in (pair.model, pair.plain))
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert len(device.tapes) == 1


def test_a_gradient_that_the_caller_keeps_is_not_overwritten(device: Device) -> None:
    pair = Pair().begin()
    assert pair.same(2)
    kept = [p.grad for p in pair.model.parameters()]
    values = [grad.clone() for grad in kept if grad is not None]
    for turn in (3, 4):
        assert pair.same(turn)
    assert all(map(torch.equal, values, kept))  # type: ignore[arg-type]
    assert len(device.tapes) == 2  # recorded again, when the next step had no gradients


def test_a_run_between_recordings_has_no_arena(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next recording would be made beside the arena's block, which has the bytes of the whole step."""
    arenas: list[Any] = []
    monkeypatch.setattr(step, "StepArena", lambda *given: arenas.append(given))
    pair = Pair().begin()
    ours = pair.ours._latest
    ours.report = replace(ours.report, held=ours.report.budget + 1)
    assert pair.same(2)
    kept = [p.grad for p in pair.model.parameters()]
    assert pair.same(3) and kept and not arenas


def test_parameters_that_move_are_read_where_they_are_then(device: Device) -> None:
    pair = Pair().begin()
    assert pair.same(2)
    for parameter in pair.model.parameters():
        parameter.data = parameter.detach().clone()
    assert pair.same(3) and len(device.tapes) == 2
    for module in (pair.plain, pair.model):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)  # which is no move
    assert pair.same(4) and len(device.tapes) == 2


def test_what_moves_all_the_time_ends_up_op_by_op(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST", 2)
    model = Layers()
    ours = memgraph.compile(model, "1GB", cuda_graphs=True)
    with torch.no_grad():
        for turn in range(6):
            model.count.data = model.count.clone()
            assert torch.equal(ours(batch(turn)), Layers()(batch(turn)))
    assert len(device.tapes) == 2


@pytest.mark.long
def test_another_kind_of_step_takes_the_memory_and_a_new_recording_is_made_later(device: Device) -> None:
    pair = Pair().begin()
    assert pair.same(2)
    assert len(device.pool.in_use) == 1  # the recording's, whose addresses are in it
    first = weakref.ref(_recording(pair))
    assert pair.same(3, rows=60)
    assert first() is None and not device.pool.in_use
    assert pair.same(4, rows=60) and pair.same(5, rows=60) and len(device.tapes) == 2
    assert pair.same(6) and len(device.tapes) == 3


def test_a_plan_that_takes_its_place_is_recorded_itself(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replan, "replanned", lambda choice, *_: choice)
    pair = Pair().begin()
    assert pair.same(2) and pair.same(3) and not device.tapes  # measured and timed again
    assert pair.same(4) and len(device.tapes) == 1


def test_a_step_without_backward_is_one_graph(device: Device) -> None:
    model = Layers()
    ours = memgraph.compile(model, "1GB", cuda_graphs=True)
    with torch.no_grad():
        for turn in range(4):
            assert torch.equal(ours(batch(turn)), Layers()(batch(turn)))
    assert [len(tapes.lines) for tapes in device.tapes] == [1]


@pytest.mark.usefixtures("device")
def test_a_graph_that_shall_be_kept_is_refused_before_it_is_gone() -> None:
    pair = Pair().begin()
    loss = pair.ours(batch(2))
    with pytest.raises(memgraph.RecordingError, match=r"retain_graph=True.*without cuda_graphs="):
        loss.backward(retain_graph=True)
    loss.backward()  # once, it is there
    expected = facts(pair.plain, pair.plain, batch(2))
    found = [loss.detach(), *(p.grad for p in pair.model.parameters() if p.grad is not None), *pair.model.buffers()]
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_what_the_device_cant_record_is_an_error_or_runs_op_by_op(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Tapes, "record", fails)
    pair, lenient = Pair().begin(), Pair(cuda_graphs="auto").begin()
    with pytest.raises(memgraph.RecordingError, match="can't record this step: operation not permitted"):
        pair.same(2)
    assert lenient.same(2) and lenient.same(3) and len(device.tapes) == 2
    assert "not recorded: the device can't record this step" in str(lenient.ours.plan)


def _recording(pair: Pair) -> CudaGraphPair:
    replays = pair.ours._latest.cuda_graphs
    assert replays is not None and replays.recording is not None
    return replays.recording


# --- what is not recorded


class Odd(nn.Module):
    """Does with a layer and its input what no graph does."""

    def __init__(self, do: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.do = do

    def forward(self, x: Tensor) -> Any:
        return self.do(self.layer, x)


def two(layer: nn.Module, x: Tensor) -> Any:
    y = layer(x)
    return y.mean(), y.sum()


def changed(layer: nn.Module, x: Tensor) -> Any:
    return layer(x.mul_(2)).sum()


REFUSED: dict[Callable[[nn.Module, Tensor], Any], str] = {
    two: "gradients may come for some of its outputs and not for others",
    changed: "forward changes an input in place",
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("do", REFUSED, ids=lambda do: do.__name__)
def test_what_no_graph_does_is_refused_or_said(do: Callable[[nn.Module, Tensor], Any]) -> None:
    why = REFUSED[do]
    with pytest.raises(memgraph.RecordingError, match=f"can't be recorded: {why}; compile without"):
        memgraph.compile(Odd(do), "1GB", cuda_graphs=True)(torch.ones(2, 4))
    lenient = memgraph.compile(Odd(do), "1GB", cuda_graphs="auto")
    lenient(torch.ones(2, 4))
    assert f"not recorded: {why}" in str(lenient.plan)


@pytest.mark.usefixtures("device")
def test_gradients_of_inputs_or_that_are_there_and_hooks_and_updates_in_backward_are_refused() -> None:
    def refused(match: str, x: Tensor, prepare: Any = lambda model: None, **options: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        prepare(model)
        options = {name: make(model) if name == "optimizer" else make for name, make in options.items()}
        ours = memgraph.compile(model, "1GB", cuda_graphs=True, loss=lambda y: y.sum(), **options)
        with pytest.raises(memgraph.RecordingError, match=match):
            ours(x)

    x = torch.ones(2, 4)
    refused("before the module", x.clone().requires_grad_())
    refused("it adds to gradients", x, lambda model: model(x).sum().backward())
    refused("a hook", x, lambda model: model[0].weight.register_hook(lambda grad: None))
    refused("in backward", x, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1), fuse_update=True)


@pytest.mark.usefixtures("device")
def test_what_a_recording_keeps_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "make_plan", passes.make_plan)
    plain = memgraph.plan(Layers(), batch(0), budget="1GB", offload=None)
    exact = memgraph.compile(Layers(), plain.peak, cuda_graphs="auto", offload=None, time_limit=0)
    exact(batch(0))
    assert "bytes more than the plan leaves of the budget" in str(exact.plan)
    insisting = memgraph.compile(Layers(), plain.peak, cuda_graphs=True, offload=None, time_limit=0)
    insisting(batch(0))
    kept = batch(0).nbytes + 2 * 4  # the input, the loss and its tangent
    assert insisting.plan.plan and insisting.plan.peak <= plain.peak
    assert next(op for op in insisting.plan.forecast.trace.ops if op.name == "kept_for_replays").makes[0].nbytes == kept


def test_on_a_cpu_it_is_an_error() -> None:
    with pytest.raises(ValueError, match="cuda_graphs= is for steps on a GPU, and the model is on cpu"):
        memgraph.compile(Layers(), "1GB", cuda_graphs="auto")
