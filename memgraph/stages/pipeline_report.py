"""The forecast of a mini-batch in stages, as text.

1f1b, 2 stages on 2 ranks, 8 micro-batches
stage  rank  begins at          forward  backward  recomputed first  open forwards
0      0     embedding          1.5 ms   3.1 ms    0.2 ms            2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from passes.stages.makespan import least_makespan
from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.timeline import StageTimes, Timeline

from ..report.tables import mb, ms, printed, table
from .stage_cut import StageCut

BOUNDED = ("1f1b", "gpipe")  # schedules with a proven bound


@dataclass(frozen=True, eq=False)
class PipelineReport:
    """The plan of a mini-batch on all ranks.

    Attributes:
        times: forecast times of each stage.
        peaks: forecast bytes of each rank.
        measured: bytes of this rank in the first run of the plan; None before.
    """

    schedule: PipelineSchedule
    cut: StageCut
    times: tuple[StageTimes, ...]
    budgets: tuple[int, ...]
    peaks: tuple[int, ...]
    rank: int
    measured: int | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """When each action of each rank runs, by the forecast."""
        return self.schedule.timeline(self.times)

    @property
    def us(self) -> float:
        """The forecast microseconds of a mini-batch."""
        return self.timeline.us

    @cached_property
    def least_us(self) -> float | None:
        """The least microseconds of a mini-batch with any cut and plans; None for a schedule without a proof."""
        if self.schedule.name not in BOUNDED:
            return None
        forwards = [self.schedule.open_forwards(stage) for stage in range(self.schedule.stages)]
        return least_makespan(self.cut.step.costs, self.budgets, forwards, self.schedule.chunks, self.cut.step.copy_us)

    def __str__(self) -> str:
        schedule = self.schedule
        title = f"{schedule.name}, {schedule.stages} stages on {schedule.ranks} ranks, {schedule.chunks} micro-batches"
        columns = ("forward", "backward", "gradients later", "recomputed first", "open forwards")
        stages = table(title, "stage", "rank", "begins at", *columns, right=columns)
        for stage, (times, begin) in enumerate(zip(self.times, self.cut.begins, strict=True)):
            op = next(each for each in self.cut.step.trace.ops[begin:] if not each.is_input)
            us = map(ms, (times.forward, times.backward, times.weights, times.recompute))
            place = f"{op.name} {op.where}".strip()
            stages.add_row(str(stage), str(stage % schedule.ranks), place, *us, str(schedule.open_forwards(stage)))
        memory = table("", "rank", "budget", "forecast", "measured", right=("budget", "forecast", "measured"))
        for rank, (budget, peak) in enumerate(zip(self.budgets, self.peaks, strict=True)):
            measured = mb(self.measured) if self.measured is not None and rank == self.rank else "-"
            memory.add_row(str(rank), mb(budget), mb(peak), measured)
        return "\n".join((printed(stages), printed(memory), self._summary))

    @property
    def _summary(self) -> str:
        hidden = sum(self.timeline.hidden)
        waiting = f"the ranks wait {self.timeline.bubble:.1%} of it, and recompute {ms(hidden)} while they would wait"
        least = "" if self.least_us is None else f"; with any cut and any plans it takes at least {ms(self.least_us)}"
        return f"a mini-batch takes {ms(self.us)}: {waiting}{least}"
