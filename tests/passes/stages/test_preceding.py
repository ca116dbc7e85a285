"""Recomputation comes before the first read of a gradient as far as the budget allows; weight gradients come last."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from passes import Machine, Plan, PlanResult, Trace, apply, make_plan, parse, parse_plan
from passes.concurrent_forwards import with_plan
from passes.ir.errors import BudgetError
from passes.ir.invariants import check
from passes.stages.fixed_plans import recompute_all
from passes.stages.preceding import first_gradient_read, recompute_early
from passes.stages.weights import weight_ops, weights_last

from .test_cut import traces

STAGE = """
    forward:
    w = parameter()  # makes w:40
    x = input()  # makes x:10
    a = mm(x, w)  # makes a:100 | 5.0 us
    b = relu(a)  # makes b:100 | 1.0 us
    c = gelu(b)  # makes c:100 | 1.0 us
    e = mm(c, w)  # makes e:10 | 5.0 us
    backward:
    d = tangent()  # makes d:10
    gc = mm(d, w)  # makes gc:300 | 5.0 us
    gb = gelu_backward(gc, b)  # makes gb:100 | 1.0 us
    ga = relu_backward(gb, a)  # makes ga:100 | 1.0 us
    gw = mm(d, c)  # makes gw:40 | 5.0 us
    gx = mm(ga, w)  # makes gx:10 | 5.0 us
    return output e, gradient gw, watched gx
    """
PLAN = "recompute b: before gb\nrecompute c: before gw\n"


def _forecast(trace: Trace, budget: int) -> Callable[[Plan], PlanResult]:
    return partial(with_plan, trace, Machine(budget), 1)


class TestPreceding(TestCase):
    def test_all_comes_first_where_there_is_room(self) -> None:
        trace = parse(STAGE)
        forecast = _forecast(trace, 10_000)
        choice = recompute_early(forecast(parse_plan(PLAN)), 10_000, forecast)
        self.assertExpectedInline(
            "\n".join(map(str, choice.plan)),
            """\
recompute b: before gc
recompute c: before gc""",
        )

    def test_as_much_as_fits_comes_first(self) -> None:
        trace = parse(STAGE)
        forecast = _forecast(trace, 10_000)
        plain = forecast(parse_plan(PLAN))
        rows = []
        for budget in range(plain.forecast.peak, plain.forecast.peak + 300, 50):
            choice = recompute_early(plain, budget, forecast)
            rows.append(f"{budget}: {choice.forecast.peak}, {', '.join(map(str, choice.plan))}")
        self.assertExpectedInline(
            "\n".join(rows),
            """\
670: 670, recompute c: before gw, recompute b: before gc
720: 670, recompute c: before gw, recompute b: before gc
770: 770, recompute b: before gc, recompute c: before gc
820: 770, recompute b: before gc, recompute c: before gc
870: 770, recompute b: before gc, recompute c: before gc
920: 770, recompute b: before gc, recompute c: before gc""",
        )

    def test_gradients_of_parameters_come_last(self) -> None:
        trace = weights_last(parse(STAGE))
        names = [op.name for op in trace.ops[trace.boundary :]]
        self.assertExpectedInline(str(names), """['d', 'gc', 'gb', 'ga', 'gx', 'gw']""")


def test_nothing_is_moved_where_nothing_is_sent() -> None:
    trace = parse(STAGE.replace(", watched gx", ""))
    assert weights_last(trace) == trace


def test_what_is_written_in_place_stays_where_it_is() -> None:
    trace = parse(
        STAGE.replace(
            "gb = gelu_backward(gc, b)",
            "gi = add_(gc, d)  # holds gc | 1.0 us | once\n    gb = gelu_backward(gi, b)",
        )
    )
    assert weight_ops(trace) == {"gw"}
    moved = weights_last(trace)
    assert [op.name for op in moved.ops if op.name in ("gc", "gi", "gb")] == ["gc", "gi", "gb"]


@given(traces(), st.floats(0.3, 1.0))
def test_an_early_plan_runs_the_same_ops_within_the_budget(trace: Trace, share: float) -> None:
    plain = with_plan(trace, Machine(1), 1, ()).forecast
    machine = Machine(max(1, int(share * plain.peak)))
    try:
        choice = make_plan(trace, machine)
    except BudgetError:
        return
    forecast = partial(with_plan, choice.captured.trace, machine, 1)
    early = recompute_early(choice, machine.budget, forecast)
    check(early.forecast.trace)
    assert early.forecast.peak <= machine.budget
    assert sorted(op.recomputes for op in early.forecast.trace.ops) == sorted(
        op.recomputes for op in choice.forecast.trace.ops
    )


@given(traces())
def test_everything_that_may_run_twice_is_recomputed(trace: Trace) -> None:
    planned = apply(trace, recompute_all(trace, Machine(1 << 40)))
    check(planned)
    read = {name for op in planned.ops[planned.boundary :] for name in op.reads}
    returned = set(trace.held_by(value for _, value in trace.outputs))
    movable = (op for op in trace.ops[: trace.boundary] if not op.is_input and not op.once and op.nbytes)
    assert not read & {op.name for op in movable if returned.isdisjoint(op.holds)}


@given(traces())
def test_a_trace_with_weights_last_is_valid(trace: Trace) -> None:
    moved = weights_last(trace)
    check(moved)
    assert sorted(op.name for op in moved.ops) == sorted(op.name for op in trace.ops)
    assert first_gradient_read(moved) is None or not weight_ops(moved) or moved.ops[-1].name in weight_ops(moved)
