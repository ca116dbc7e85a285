"""The steps that ranks cut: captured on each of them, with what is measured on the first.

rank 0: mm_1 takes 40 us    rank 1: mm_1 takes 43 us    ->    mm_1 takes 40 us, on all ranks of all replicas
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from passes import Machine, Trace
from passes.concurrent_forwards import unplanned_nbytes
from passes.ir.machine import rates, with_rates

from ..oss.comm.rank_group import all_texts
from ..oss.comm.watchdog import CollectiveWatchdog
from ..profile.link_bandwidth import sizes_of
from .arguments import PipelineArguments
from .chunks import MicroBatch
from .ranks.machine import measure_disks, measure_network
from .ranks.stage_group import PLANNING, StageGroup
from .state import random_numbers
from .state.draw_counts import draw_counts
from .whole_step import WholeStep, whole_step

ONE_ROW = "Expected more than 1 value per channel"  # torch's words


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
