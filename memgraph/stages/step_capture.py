"""The steps that ranks cut: captured on each of them, with what is measured on the first.

rank 0: mm_1 takes 40 us    rank 1: mm_1 takes 43 us    ->    mm_1 takes 40 us, on all ranks of all replicas

The machine that all ranks of a pipeline plan for: the network between them, and their disks.

rank 0 sends 1 KB and 256 KB to rank 1, which sends them back    ->    900 bytes per microsecond after 60 microseconds
each rank copies to its disk while the others do                 ->    the rates of the slowest
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from passes import Machine, Network, Trace
from passes.concurrent_forwards import unplanned_nbytes
from passes.ir.machine import rates, with_rates

from ..oss.comm.rank_group import all_texts
from ..oss.comm.watchdog import CollectiveWatchdog
from ..profile.link_bandwidth import sizes_of
from ..profile.machine_profile import measure_links
from ..storage.spill_file import Folder
from .arguments import PipelineArguments
from .chunks import MicroBatch
from .ranks.messages import Message, receive, send, wait_for
from .ranks.stage_group import PLANNING, StageGroup
from .state import random_numbers
from .state.draw_counts import draw_counts
from .whole_step import WholeStep, whole_step

ONE_ROW = "Expected more than 1 value per channel"  # torch's words
SIZES = (1 << 10, 1 << 18)  # bytes of a small message, and of a large one
TRIES = 4  # the fastest counts: the first one opens connections


@dataclass(frozen=True, eq=False)
class StepCapture:
    """Captures steps together with all ranks.

    Attributes:
        updates_nbytes: bytes that the optimizer's states and its update take for all parameters.
        replicas: the ranks that have the same stages in other pipelines, if they are known.
        loss_output, machine: of an earlier step.
    """

    module: nn.Module
    group: StageGroup
    given: PipelineArguments
    updates_nbytes: int
    replicas: CollectiveWatchdog | None
    loss_output: int | None = None
    machine: Machine | None = None

    def steps(self, batches: Sequence[MicroBatch], lines: Iterable[str]) -> list[WholeStep]:
        """Capture the step of each micro-batch. Ranks that plan with the same numbers find the same plans.

        Args:
            lines: what else has to be equal on all ranks.
        """
        with self.group.together(PLANNING) as compared:
            steps = [self._step(batch) for batch in batches]
            if self.group.rank == 0:
                steps = [replace(step, drawn=draw_counts(step.captured.graph.graph)) for step in steps]
            compared += [*(line for step in steps for line in step.ops), *lines]
        own = json.dumps([[[op.us for op in step.trace.ops] for step in steps], [step.drawn for step in steps]])
        shared = self.group.share(own.encode(), "exchange of times")[0]
        measured = json.loads(of_first_pipeline(self.replicas, shared))
        machine = self._machine(steps[0].trace)
        own = json.dumps([rates(machine), machine.link.capacity])
        speeds, capacity = json.loads(of_first_pipeline(self.replicas, own.encode()))
        machine = with_rates(machine, speeds)
        machine = replace(machine, link=replace(machine.link, capacity=capacity))
        return [step.measured(us, drawn, machine) for step, us, drawn in zip(steps, *measured, strict=True)]

    def _step(self, batch: MicroBatch) -> WholeStep:
        try:
            return whole_step(self.module, batch.args, batch.kwargs, self.loss_output)
        except ValueError as error:
            if ONE_ROW not in str(error):
                raise
            raise ValueError(
                f"a BatchNorm normalizes each micro-batch by itself, and with chunks={self.given.chunks} one has a "
                f"single row; give fewer chunks, or other numbers of rows. torch says: {error}"
            ) from error

    def _machine(self, trace: Trace) -> Machine:
        """Return what the ranks plan for. Disks are measured once a step does not fit as it is."""
        machine = self.machine or Machine(0, network=measure_network(self.group))
        plain = unplanned_nbytes(trace, Machine(0), self.given.chunks) + self.updates_nbytes
        least = min(
            min(each.stage_budgets(1 / each.stages_per_rank)) for chain in self.given.candidates for each in chain
        )
        if machine.link.works or plain <= least or self.given.checkpoint != "auto":
            return machine
        folder, room = self.given.spill_dir, self.given.budgets[self.group.rank]
        return measure_disks(self.group, machine, self.given.offload, folder, sizes_of(trace), room)


def random_nbytes(steps: Iterable[WholeStep]) -> int:
    """Return the bytes of generators, if a step draws random numbers."""
    return random_numbers.NBYTES if any(step.draws for step in steps) else 0


def of_first_pipeline(replicas: CollectiveWatchdog | None, own: bytes) -> bytes:
    """Return the bytes of the first of all replicas, which cut the model at the same places."""
    return own if replicas is None else all_texts(replicas, own, "exchange of the stages of all pipelines")[0]


def measure_network(group: StageGroup) -> Network:
    """Return what the first two ranks measure, on all ranks."""
    if group.ranks == 1:
        return Network()
    small, large = (_fastest_us(group, nbytes) for nbytes in SIZES)
    rate = (SIZES[1] - SIZES[0]) / max(large - small, 1.0)
    own = json.dumps([rate, small]).encode()
    return Network(*json.loads(group.share(own, "exchange of the network's speed")[0]))


def measure_disks(
    group: StageGroup, machine: Machine, tier: str | None, folder: Folder, sizes: Sequence[int], room: int
) -> Machine:
    """Return the machine with the slowest link of all ranks, which may share a disk.

    Args:
        sizes: bytes of the values that may be offloaded.
        room: bytes of memory that measuring may use.
    """
    if tier is None:
        return machine
    group.check_agreement(["the disks are measured"])  # all at once
    with group.together("measuring the disk"):
        link = measure_links(machine, tier, torch.device("cpu"), folder, sizes, room=room).link
    own = [link.out, link.back, -link.call_us, -link.us_per_byte, link.capacity // group.ranks]
    texts = group.share(json.dumps(own).encode(), "exchange of the disks' speed")
    out, back, call_us, us_per_byte, capacity = map(min, zip(*map(json.loads, texts), strict=True))
    link = replace(link, out=out, back=back, call_us=-call_us, us_per_byte=-us_per_byte, capacity=capacity)
    return replace(machine, tier=tier, link=link)


def _fastest_us(group: StageGroup, nbytes: int) -> float:
    """Return the microseconds of the fastest message there, which are half of those there and back."""
    value = torch.empty(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(TRIES if group.rank < 2 else 0):
        begin = time.perf_counter()
        there, back = Message("there", value, 0, 1), Message("back", value, 1, 0)
        if group.rank == 0:
            works = send(group, [(there, value)])
            receive(group, [back]).wait()
        else:
            works = send(group, [(back, receive(group, [there]).wait()["there"])])
        wait_for(group, works)
        times.append((time.perf_counter() - begin) * 1e6 / 2)
    return min(times, default=0.0)
