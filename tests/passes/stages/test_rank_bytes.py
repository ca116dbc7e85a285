"""The forecast of a rank with several stages is what its actions take, run op by op, on random steps and schedules."""

from __future__ import annotations

from dataclasses import dataclass, field

from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from passes import Machine, Trace, parse
from passes.concurrent_forwards import with_plan
from passes.ir.liveness import RELEASED
from passes.ir.machine import Link
from passes.ir.trace import OTHER_FORWARDS
from passes.simulate.forecast import Forecast
from passes.stages.action import FORWARD
from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.rank_bytes import StageBytes, rank_peak
from tests.support.strategies import recomputes, trips

from .test_cut import traces
from .test_preceding import STAGE

MACHINE = Machine(1 << 40, link=Link(1000.0, 1000.0, 64))
RESIDENT = ("parameter", "buffer", "gradient", "state")


@dataclass
class Rank:
    """Counts the bytes of a rank, op by op.

    Attributes:
        shared: the storages of each stage that are inputs and lie there once, for all micro-batches.
        live: the storages of each open micro-batch of a stage.
    """

    forecasts: dict[int, Forecast]
    shared: dict[int, set[str]]
    fixed: int
    live: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    most: int = 0

    def forward(self, stage: int, chunk: int) -> None:
        trace, live = self.forecasts[stage].trace, self.live.setdefault((stage, chunk), {})
        own = [op for op in trace.ops if op.is_input and op.fn not in (*RESIDENT, "tangent")]
        live.update((s.name, s.nbytes) for op in own for s in op.makes if s.name not in self.shared[stage])
        self._run(trace, 0, trace.boundary, live)
        if trace.boundary == len(trace.ops):
            self.live[stage, chunk] = {name: nbytes for name, nbytes in live.items() if name in _sent(trace)}

    def backward(self, stage: int, chunk: int) -> None:
        trace, live = self.forecasts[stage].trace, self.live[stage, chunk]
        live.update((s.name, s.nbytes) for op in trace.ops if op.fn == "tangent" for s in op.makes)
        self._run(trace, trace.boundary, len(trace.ops), live)
        del self.live[stage, chunk]

    def _run(self, trace: Trace, begin: int, end: int, live: dict[str, int]) -> None:
        for i in range(begin, end):
            op = trace.ops[i]
            if not op.is_input:
                live.update((made.name, made.nbytes) for made in op.makes)
            nbytes = sum(sum(each.values()) for each in self.live.values())
            self.most = max(self.most, self.fixed + nbytes + op.workspace)
            for name in list(live):
                if not _is_kept(trace, name, i):
                    del live[name]


def _is_kept(trace: Trace, storage: str, at: int) -> bool:
    """Return True if a storage stays once an op has run: it is read later, or returned, or the caller has it."""
    maker = next(op for op in trace.ops if storage in [made.name for made in op.makes])
    kinds = [kind for kind, value in trace.outputs if storage in trace.op[value].holds]
    if maker.fn == "tangent":
        is_released = RELEASED in [kind for kind, _ in trace.outputs] and not maker.type.endswith("[]")
        return not is_released or _is_read(trace, storage, at)
    if maker.is_input or any(kind != RELEASED for kind in kinds) or _is_read(trace, storage, at):
        return True
    return bool(kinds) and at < trace.boundary - 1


def _is_read(trace: Trace, storage: str, after: int) -> bool:
    return any(storage in trace.op[read].holds for op in trace.ops[after + 1 :] for read in op.reads)


@st.composite
def ranks(draw: st.DrawFn) -> tuple[PipelineSchedule, int, dict[int, Forecast], bool]:
    """Draw a schedule, a rank, a plan of each of its stages, and whether inputs lie there once."""
    schedule = PipelineSchedule(
        "interleaved", draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    )
    rank = draw(st.integers(0, schedule.ranks - 1))
    forecasts = {}
    for stage in schedule.stages_of(rank):
        trace = draw(traces(8))
        plan = draw(draw(st.sampled_from((recomputes, trips)))(trace))
        forecasts[stage] = with_plan(trace, MACHINE, schedule.open_forwards(stage), plan).forecast
    return schedule, rank, forecasts, draw(st.booleans())


def _input_storages(trace: Trace) -> dict[str, int]:
    return {made.name: made.nbytes for op in trace.ops if op.fn == "input" for made in op.makes}


@given(ranks(), st.integers(0, 1000))
def test_the_forecast_is_what_the_actions_of_the_rank_take(
    drawn: tuple[PipelineSchedule, int, dict[int, Forecast], bool], beside: int
) -> None:
    schedule, rank, forecasts, once = drawn
    given_bytes = {stage: _input_storages(each.trace) if once else {} for stage, each in forecasts.items()}
    lying = {stage: beside + sum(given_bytes[stage].values()) for stage in forecasts}
    without = [stage for stage, each in forecasts.items() if each.trace.boundary == len(each.trace.ops)]
    counted = Rank(
        forecasts,
        {stage: set(names) for stage, names in given_bytes.items()},
        sum(lying[stage] + _resident(each) for stage, each in forecasts.items()),
    )
    for kind, stage, chunk in schedule.actions[rank]:
        (counted.forward if kind == FORWARD else counted.backward)(stage, chunk)
    for stage in without:  # whose open forwards no plan counts
        held = [forecasts[stage].trace.nbytes[name] for name in _sent(forecasts[stage].trace)]
        lying[stage] += (schedule.open_forwards(stage) - 1) * sum(held)
    stages = {
        stage: StageBytes.of(each, lying[stage], sum(given_bytes[stage].values())) for stage, each in forecasts.items()
    }
    found = rank_peak(schedule.moments(rank), stages)
    assert found >= counted.most if without else found == counted.most


def _sent(trace: Trace) -> set[str]:
    return trace.held_by(value for _, value in trace.outputs)


def _resident(forecast: Forecast) -> int:
    """Return the bytes that a stage keeps for all micro-batches."""
    kept = [op for op in forecast.trace.ops if op.fn in RESIDENT and op.name != OTHER_FORWARDS]
    return sum(op.nbytes for op in kept) + forecast.staging


@given(ranks())
def test_stages_with_equal_parts_of_the_room_fit_together(
    drawn: tuple[PipelineSchedule, int, dict[int, Forecast], bool],
) -> None:
    schedule, rank, forecasts, _ = drawn
    stages = {stage: StageBytes.of(each, 0, 0) for stage, each in forecasts.items()}
    alone = {
        stage: max(each.forward, each.backward) + (schedule.open_forwards(stage) - 1) * each.open - each.kept
        for stage, each in stages.items()
    }
    kept = sum(each.kept for each in stages.values())
    assert rank_peak(schedule.moments(rank), stages) <= kept + max(alone.values()) * len(stages)


def test_two_stages_of_a_rank() -> None:
    schedule = PipelineSchedule("interleaved", 2, 2, 2)
    forecasts = {
        stage: with_plan(parse(STAGE), MACHINE, schedule.open_forwards(stage), ()).forecast for stage in (0, 2)
    }
    stages = {stage: StageBytes.of(each, 5, 10) for stage, each in forecasts.items()}
    order = " ".join(f"{kind[0].upper()}{chunk}" + "'" * (stage // 2) for kind, stage, chunk in schedule.actions[0])
    assert_expected_inline(
        f"{order}\n{stages[0]}\n{rank_peak(schedule.moments(0), stages)} bytes\n",
        """\
F0 F1 F0' F1' B0' B1' B0 B1
StageBytes(kept=45, open=310, forward=355, backward=765)
1740 bytes
""",
    )
