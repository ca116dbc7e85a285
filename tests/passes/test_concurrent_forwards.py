"""A plan for open forwards that takes few bytes follows from no budget, and is a plan for all larger ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from passes import BudgetError, Machine, Trace, make_plan
from passes.concurrent_forwards import plan_forwards, smallest_plan, unplanned_nbytes
from passes.ir.machine import Link
from passes.lp.problem import proven_nbytes
from passes.pipeline import QUICK
from passes.simulate.plan_result import PlanResult
from tests.support.strategies import traces

LINKS = [Link(), Link(out=100.0, back=100.0, staging=8)]


def quick(trace: Trace, machine: Machine) -> PlanResult:
    return make_plan(trace, machine, QUICK)


def nothing(trace: Trace, machine: Machine) -> PlanResult:
    raise BudgetError("nothing is found", machine.budget, machine.budget + 1)


@settings(max_examples=3)
@given(traces(8), st.integers(1, 3), st.sampled_from(LINKS))
def test_each_budget_from_that_of_the_smallest_plan_on_has_a_plan(trace: Trace, count: int, link: Link) -> None:
    machine = Machine(1, link=link)
    small = smallest_plan(trace, machine, count)
    assume(small.captured.trace.boundary < len(trace.ops))
    repriced = replace(trace, ops=tuple(replace(op, us=op.us * (i % 5)) for i, op in enumerate(trace.ops)))
    faster = replace(machine, budget=10**9, link=replace(link, out=9 * link.out, back=2 * link.back))
    assert smallest_plan(repriced, faster, count).plan == small.plan
    least, most = small.forecast.peak, unplanned_nbytes(trace, machine, count)
    assert least <= most
    for budget in {least, (least + most) // 2, most}:
        for search in (quick, nothing) if count > 1 else (quick,):
            assert plan_forwards(trace, replace(machine, budget=budget), count, search).forecast.peak <= budget


@settings(max_examples=3)
@given(traces(8))
def test_an_error_names_the_bytes_of_the_smallest_plan(trace: Trace) -> None:
    least, proven = smallest_plan(trace, Machine(1), 2).forecast.peak, proven_nbytes(trace, Machine(1))
    assume(trace.boundary < len(trace.ops) and proven > 1)
    with pytest.raises(BudgetError) as caught:
        plan_forwards(trace, Machine(proven - 1), 2, nothing)
    assert caught.value.smallest == least
