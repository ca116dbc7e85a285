"""Measure what a step costs the host: the CPU time of its thread, with tensors so small that kernels take none.

    python -m benchmarks.host_cost [--rounds 60]

GPT2 with 12 layers and tensors of a few numbers runs eagerly and as a step, in turn, forward and backward. Steps are
the plain one, one that recomputes whatever it can, and one that offloads whatever it can, to pinned memory whose
streams and events do nothing. Ratios to eager are taken within a round, of steps and of an op: eager runs the ops of
the plain step. Microseconds are those of an op of the planned step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import memgraph
from benchmarks.clock import Pairs, Step, in_turn, ms_text, step_of
from memgraph.planning import assembly, pricing, search
from memgraph.storage.pinned_pool import PinnedPool
from memgraph.storage.pinned_tier import PinnedTier
from passes import Machine, Trace
from passes.ir.ops import is_runtime
from passes.schedule.schedule import Placement
from tests.support.forced_plans import given_up
from tests.support.late_device import Pinned
from tests.support.models import gpt2

SIZES = {"vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 12, "n_head": 2, "use_cache": False}
WARM = 6  # rounds in which steps are measured and planned again
IDS = torch.tensor([[1, 2, 3, 4]])
PLANS = {"plain": None, "recompute": Placement.RECOMPUTE, "offload": Placement.OFFLOAD_BLOCKING}


class Idle:
    """Streams and events as of torch.cuda, which do nothing: ops of the host have ended when they return."""

    def Stream(self, device: torch.device) -> Idle:
        return Idle()

    def Event(self, enable_timing: bool = False) -> Idle:
        return Idle()

    def current_stream(self, device: torch.device) -> Idle:
        return self

    def stream(self, stream: Idle) -> Any:
        return nullcontext()

    def record(self, stream: Idle) -> None: ...
    def wait_stream(self, stream: Idle) -> None: ...
    def wait_event(self, event: Idle) -> None: ...
    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Idle) -> float:
        """Milliseconds of a copy in the timed step; plans of the body do not depend on it."""
        return 0.05


def main(rounds: int = 60) -> None:
    """Print one table."""
    torch.set_num_threads(1)
    columns = ("plan", "ops", "memory ops", "eager ms", "step ms", "ratio", "middle half", "us an op", "ratio an op")
    title = f"CPU time of the host, torch {torch.__version__}, {rounds} rounds"
    table = Table(*columns, title=title, box=None)
    for name, placement in PLANS.items():
        table.add_row(name, *_compared(placement, rounds))
    Console(width=120).print(table)


def _compared(placement: Placement | None, rounds: int) -> Sequence[str]:
    """Return the cells of a plan."""
    plain, model = (_model() for _ in range(2))
    with _planned(placement):
        ours = memgraph.compile(model, "20GB", loss=_loss)
        eager_step = step_of(plain, lambda: _loss(plain(IDS, labels=IDS)))
        step = step_of(model, lambda: ours(IDS, labels=IDS))
        taken = in_turn({"eager": eager_step, "ours": step}, rounds, WARM, _cpu_seconds)
    run, plain_run = (_run(forecast.trace) for forecast in (ours.plan.forecast, ours.plan.choice.captured))
    moves = sum(is_runtime(fn) for fn in run)
    pairs = Pairs(taken["ours"], taken["eager"])
    us = 1e6 * statistics.median(pairs.ours) / len(run)
    times = ms_text(pairs.theirs), ms_text(pairs.ours), pairs.ratio_text, pairs.spread_text
    return str(len(run)), str(moves), *times, f"{us:.1f}", f"{pairs.ratio * len(plain_run) / len(run):.2f}"


def _run(trace: Trace) -> Sequence[str]:
    """Return the ops that a step calls."""
    return [op.fn for op in trace.ops if "." in op.fn]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return gpt2(**SIZES)


def _loss(outputs: Any) -> Tensor:
    loss: Tensor = outputs.loss
    return loss


def _cpu_seconds(step: Step) -> float:
    begin = time.thread_time()
    step()
    return time.thread_time() - begin


@contextmanager
def _planned(placement: Placement | None) -> Iterator[None]:
    """Let the step of the body have one placement for all values, whatever the budget."""
    if placement is None:
        yield
        return
    cuda, pool = Idle(), PinnedPool(lambda: 1 << 30, Pinned())

    def tier(device: torch.device, slots: Sequence[int], *_: Any) -> PinnedTier | None:
        return PinnedTier(slots, device, cuda, pool) if slots else None

    def linked(machine: Machine, *_: object) -> Machine:
        return replace(machine, tier="host", link=replace(machine.link, out=100.0, back=100.0, capacity=1 << 40))

    with (
        mock.patch.object(search, "make_plan", given_up(placement)),
        mock.patch.object(assembly, "open_tier", tier),
        mock.patch.object(pricing, "measure_tiers", linked),
    ):
        yield


if __name__ == "__main__":
    typer.run(main)
