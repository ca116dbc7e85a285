"""A step in an arena: ops run behind their spacers, and what is not as noted ends it with a reason.

torch's CUDA allocator is played by stand-ins; tests/gpu/test_arena.py has the real one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.runtime import arena
from memgraph.runtime.arena import MOST_HELD, MOST_NOTED, ArenaBlock, RequestLog, Requests, StepArena, why_not_logged
from memgraph.runtime.step import Step
from passes.simulate.spacers import Event, Guide, Spacer

CPU = torch.device("cpu")
OTHER = "a run asked for other memory than the one that was noted"


class Allocator:
    """A stand-in for torch's allocator: spacers that are held, a block, and how much the pool has."""

    def __init__(self) -> None:
        self.held: list[tuple[str, list[Any]]] = []
        self.pool, self.blocks, self.is_held, self.is_capturing = 100, 0, False, False
        self.stream = "the caller's"


class Log:
    """A log that notes names only."""

    is_open = False

    def __init__(self, device: torch.device) -> None:
        self.ops: list[tuple[int, str]] = []
        self.half = -1
        assert not Log.is_open, "the allocator has one history"
        Log.is_open = True

    def begin_half(self) -> None:
        self.half += 1
        self.note("")

    def note(self, name: str) -> None:
        self.ops.append((self.half, name))

    def end(self) -> Requests:
        Log.is_open = False
        return Requests([Event(op, op, 4 << 20) for op in range(len(self.ops))], self.ops, 4 << 20, why_not_placed="")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """A step on a CPU whose arena has these stand-ins."""
    played = Allocator()

    class Block:
        device, results = CPU, list[Any]()

        def __init__(self, nbytes: int, device: torch.device) -> None:
            played.blocks += 1
            self.stream = played.stream

        @property
        def is_held(self) -> bool:
            return played.is_held

        def note(self, results: Any) -> None:
            pass

        @contextmanager
        def used(self) -> Iterator[None]:
            yield

    def guide(events: Any, limit: int) -> Guide:
        return Guide(64, {event.op: (Spacer(512, True), Spacer(512, False)) for event in events}, 64, 64, 64, 0)

    def hold(spacers: Any, device: torch.device, op: int) -> list[Any]:
        block = [torch.empty(1)]
        played.held.append((str(op), [weakref.ref(block[0])]))
        return block

    monkeypatch.setattr(Log, "is_open", False)
    for name, stand_in in {"ArenaBlock": Block, "RequestLog": Log, "guide": guide, "_hold": hold}.items():
        monkeypatch.setattr(arena, name, stand_in)
    monkeypatch.setattr(arena, "why_not_logged", lambda device: "")
    monkeypatch.setattr(arena, "_held_nbytes", lambda device: played.pool)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: played.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: played.is_capturing)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.peak": 7, "reserved_bytes.all.peak": 9}
    )

    def placed(step: Step) -> Any:
        step.arena = step.arena or StepArena(step.parts.halves, CPU, 1 << 30)
        return step.arena.begin()

    monkeypatch.setattr(Step, "_placed", placed)
    return played


def trained(model: nn.Module, called: Callable[..., Tensor], steps: int = 1) -> list[Tensor]:
    facts = []
    for step in range(steps):
        loss = called(torch.linspace(-1, 1, 32).view(4, 8) * (step + 1)).sum()
        loss.backward()
        facts += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad(set_to_none=True)
    return facts


def subject() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def in_arena() -> tuple[nn.Module, Any]:
    """Return a model and its compiled module, whose next run is in the arena."""
    model = subject()
    ours = memgraph.compile(model, "1GB")
    trained(model, ours, 3)  # measured, timed, noted
    return model, ours


def test_each_op_runs_behind_its_spacers_and_bits_are_eagers(allocator: Allocator) -> None:
    model, ours = in_arena()
    assert not allocator.held
    plain = subject()
    found, expected = trained(model, ours), trained(plain, plain)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert len(allocator.held) > 10 and allocator.blocks == 1
    assert not any(ref() for _, refs in allocator.held for ref in refs), "spacers are freed behind their op"
    assert "in an arena: one block" in str(ours.plan)
    assert (ours.plan.blocks, ours.plan.held) == (7, 9)


def test_spacers_are_held_while_their_op_runs(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours = in_arena()
    code = ours._latest.arena._code[ours._latest.arena.halves[0]]
    alive = []

    def relu(x: Tensor) -> Tensor:
        alive.append([ref() is not None for _, refs in allocator.held for ref in refs])
        return torch.relu(x)

    monkeypatch.setitem(code.__globals__, "op_aten_relu_default", relu)
    trained(model, ours)
    assert alive and alive[0][-1] and not any(alive[0][:-1])


def test_a_pool_that_grows_ends_the_arena(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours = in_arena()
    grown = iter(range(100, 10_000))
    monkeypatch.setattr(arena, "_held_nbytes", lambda device: next(grown))
    plain = subject()
    assert all(map(torch.equal, trained(model, ours, 3), trained(plain, plain, 3)))
    assert ours.plan.arena == f"not in an arena: {OTHER}"


def test_results_that_stay_end_the_arena(allocator: Allocator) -> None:
    model, ours = in_arena()
    trained(model, ours)
    allocator.is_held = True
    trained(model, ours, MOST_HELD - 1)
    assert "in an arena: one block" in str(ours.plan)
    trained(model, ours)
    assert ours.plan.arena == "not in an arena: gradients or outputs of a run are held when another one begins"
    assert allocator.blocks == 1


def test_what_is_free_of_a_block_can_be_used_while_results_are_held_in_it(allocator: Allocator) -> None:
    """torch's pool serves requests that find no memory (`use_on_oom`) as long as it is there."""
    model, ours = in_arena()
    trained(model, ours)
    block = weakref.ref(ours._latest.arena._block)
    allocator.is_held = True
    trained(model, ours)
    assert ours._latest.arena._block is None and block() is not None
    allocator.is_held = False
    with torch.no_grad():
        ours(torch.ones(2, 8))  # another step
    assert block() is None


def test_the_next_run_has_a_block_once_results_are_gone(allocator: Allocator) -> None:
    model, ours = in_arena()
    trained(model, ours)
    allocator.is_held = True
    trained(model, ours)
    allocator.is_held = False
    trained(model, ours)
    assert allocator.blocks == 2 and ours._latest.arena._block is not None


def test_a_run_that_is_not_noted_to_its_end_is_noted_again(allocator: Allocator) -> None:
    model = subject()
    ours = memgraph.compile(model, "1GB")
    trained(model, ours, 2)
    ours(torch.ones(4, 8))  # has no backward
    trained(model, ours)
    assert ours._latest.arena._guide is not None and not allocator.held
    trained(model, ours)
    assert allocator.held


def test_a_step_that_never_runs_as_planned_is_noted_a_few_times_only(allocator: Allocator) -> None:
    model = subject()
    ours = memgraph.compile(model, "1GB")
    trained(model, ours, 2)
    for _ in range(MOST_NOTED):
        assert not ours.plan.arena
        ours(torch.ones(4, 8))  # has no backward
    assert ours.plan.arena == "not in an arena: its runs have other halves than planned, or no backward"
    assert ours._latest.arena.begin() is None


def test_one_step_is_noted_at_a_time(allocator: Allocator) -> None:
    """The allocator has one history, and marks of two steps in it would be taken for one another."""
    model, other = subject(), subject()
    ours, theirs = memgraph.compile(model, "1GB"), memgraph.compile(other, "1GB")
    for _ in range(5):
        theirs(ours(torch.ones(4, 8))).sum().backward()
    assert ours._latest.arena._guide is not None and theirs._latest.arena._guide is not None
    assert theirs._latest.arena.why_not == ""


def test_the_history_of_a_caller_is_a_reason_and_that_of_a_log_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 0}))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *given, **options: None)
    assert why_not_logged(CPU) == "the history of torch's allocator is being recorded"
    log = RequestLog(CPU)
    assert why_not_logged(CPU) == ""

    def snapshot(device: torch.device) -> Any:
        raise RuntimeError("no memory is left for it")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", snapshot)
    with pytest.raises(RuntimeError, match="no memory"):
        log.end()
    assert why_not_logged(CPU) == "the history of torch's allocator is being recorded"


def test_a_run_on_another_stream_has_a_block_of_that_stream(allocator: Allocator) -> None:
    """The allocator gives what was freed on a stream to requests of that stream alone."""
    model, ours = in_arena()
    trained(model, ours)
    allocator.stream = "another"
    trained(model, ours, 2)
    assert allocator.blocks == 2 and ours._latest.arena._block.stream == "another"
    assert "in an arena: one block" in str(ours.plan)


class Pools:
    """The pools of two devices, with the counts of their users, as torch has them."""

    def __init__(self) -> None:
        self.current, self.users = 0, dict[tuple[int, str], int]()

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def MemPool(self, use_on_oom: bool) -> str:
        self.users[self.current, "pool"] = 1
        return "pool"

    @contextmanager
    def use_mem_pool(self, pool: str, device: torch.device) -> Iterator[None]:
        assert self.users.get((device.index, pool), 1), "torch: INTERNAL ASSERT FAILED, use_count > 0"
        self.users[device.index, pool] = self.users.get((device.index, pool), 0) + 1
        yield
        self.users[device.index, pool] -= 1


def test_a_block_can_be_used_again_on_a_device_that_is_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, empty = Pools(), torch.empty
    for name in ("device", "MemPool", "use_mem_pool"):
        monkeypatch.setattr(torch.cuda, name, getattr(pools, name))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device: empty(n, dtype=dtype))
    block = ArenaBlock(512, torch.device("cuda", 1))
    for _ in range(2):
        with block.used():
            pass
    assert pools.users == {(1, "pool"): 1}


def test_a_step_that_the_caller_records_allocates_where_the_recording_does(allocator: Allocator) -> None:
    model, ours = in_arena()
    allocator.is_capturing = True
    trained(model, ours)
    assert not allocator.held
    allocator.is_capturing = False
    trained(model, ours)
    assert allocator.held


def test_other_steps_get_the_block(allocator: Allocator) -> None:
    model, ours = in_arena()
    trained(model, ours)
    assert ours._latest.arena._block is not None
    step = ours._latest
    with torch.no_grad():
        ours(torch.ones(2, 8))
    assert step.arena._block is None
    trained(model, ours)
    assert allocator.blocks == 2


def test_segments_that_are_expandable_and_other_allocators_are_a_reason(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Log, "end", lambda log: Requests([], log.ops, 0, "segments are expandable"))
    _, ours = in_arena()
    assert ours.plan.arena == "not in an arena: segments are expandable"
    assert "other ranks" in StepArena(ours._latest.parts.halves, CPU, 1, has_collectives=True).why_not
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert why_not_logged(CPU) == "the allocator is cudaMallocAsync, and not torch's own"


USUAL = {"expandable_segments": False, "max_split_size": -1, "roundup_power2_divisions": {"1": 0, "2": 0}}


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({}, ""),
        ({"expandable_segments": True}, "segments are expandable"),
        ({"max_split_size": 512 << 20}, "torch does not divide a larger block"),
        ({"roundup_power2_divisions": {"1": 0, "2": 4}}, "blocks are larger than what is asked for"),
    ],
)
def test_settings_that_give_out_other_blocks_are_a_reason(setting: dict[str, Any], why: str) -> None:
    found = arena.why_not_placed({**USUAL, **setting})
    assert why in found and bool(why) == bool(found)


def test_a_history_is_read_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are on stream 9. What is requested between halves, on other streams, or behind the last op is left out."""
    log = RequestLog.__new__(RequestLog)
    log.device, log._stream = CPU, 0
    log._ops = [(0, ""), (0, "mm"), (0, "relu"), (1, ""), (1, "mul")]
    monkeypatch.setattr(arena, "_mark_stream", lambda device: type("Stream", (), {"cuda_stream": 9}))

    def alloc(addr: int, size: int, stream: int = 0) -> dict[str, Any]:
        return {"action": "alloc", "addr": addr, "size": size, "stream": stream}

    def free(addr: int) -> dict[str, Any]:
        return {"action": "free_completed", "addr": addr, "size": 0, "stream": 0}

    mark = alloc(99, 1, 9)
    history = [
        alloc(1, 512), mark, alloc(2, 1000), alloc(3, 8, 5), mark, alloc(4, 0), free(2), mark, alloc(5, 512), free(4), mark,
        alloc(2, 513), mark, free(2),
    ]  # fmt: skip
    assert log._events(history) == [
        Event(1, 0, 1024), Event(2, 1, 512), Event(2, 0, 0), Event(3, 1, 0), Event(4, 4, 1024),
    ]  # fmt: skip
