"""The bytes at each moment are the simulator's for the same recomputation, whatever was added and removed before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from expecttest import assert_expected_inline
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from passes import Machine, Trace, apply, check, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.deep import phase_lp
from passes.deep.phase_lp import PhaseProblem
from passes.deep.rerun_state import RerunState
from passes.lp.problem import PlanProblem
from tests.passes.search.test_greedy import STEP
from tests.support.interpreter import run
from tests.support.strategies import traces

ALONE = Machine(0)


def moments(trace: Trace, budget: int = 0) -> RerunState:
    return RerunState(PhaseProblem(PlanProblem(ReuseGaps(trace), replace(ALONE, budget=budget)), budget), budget)


def keys(data: st.DataObject, found: RerunState) -> list[int]:
    """Draw the keys of some recomputation."""
    program = found.problem
    again = [o for o in found.phase_problem.producers if not program.producers[o].runs_once]
    assume(again and program.boundary < program.size)
    pair = st.tuples(st.sampled_from(again), st.integers(program.boundary, program.size - 1))
    return [place * found.stride + o for o, place in data.draw(st.lists(pair, max_size=8, unique=True))]


def said(found: RerunState) -> str:
    """The bytes at each moment; re-runs are in brackets."""
    words = []
    for key, nbytes in zip(found.keys, found.excess, strict=True):
        position, o = divmod(key, found.stride)
        is_op = o == found.stride - 1
        words.append(
            f"{STEP.ops[position].name}:{nbytes}" if is_op else f"({found.problem.producers[o].value}:{nbytes})"
        )
    return " ".join(words)


def test_a_recomputed_value_stays_until_its_last_read() -> None:
    found = moments(STEP)
    lines = [said(found)]
    for maker in (1, 0):
        found.add(found.problem.gaps.trace.index["r"] * found.stride + maker)
        lines.append(said(found))
    assert_expected_inline(
        "\n".join(lines),
        """\
x:100 d:100 a:1100 b:2100 c:3100 e:4600 f:5600 o:5604 p:6608 q:7108 r:5608 s:4108 t:3108 u:1208
x:100 d:100 a:1100 b:2100 c:3100 e:3600 f:4600 o:4604 p:5608 q:6108 (b:4608) r:5608 s:4108 t:3108 u:1208
x:100 d:100 a:1100 b:2100 c:2100 e:2600 f:3600 o:3604 p:4608 q:5108 (a:3608) (b:4608) r:5608 s:4108 t:3108 u:1208""",
    )


@settings(max_examples=100)
@given(traces(max_forward=12), st.data())
def test_the_simulator_says_the_same(trace: Trace, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phase_lp, "NEGLIGIBLE", 0.0)
        found = moments(trace)
        found = found.with_reruns(tuple(keys(data, found)))
        applied = apply(trace, found.plan())
    check(applied)
    forecast = predict(applied, ALONE)
    ran = {op.recomputes for op in applied.ops} - {""}
    assert abs(forecast.us - predict(trace, ALONE).us - found.us) < 1e-6
    drawn = sum(op.draws for op in trace.ops if op.name in ran)
    assert found.excess.max() <= forecast.peak <= found.excess.max() + 3 * drawn
    assert run(applied).computed == run(trace).computed


@settings(max_examples=100)
@given(traces(max_forward=12), st.data())
def test_recomputations_added_and_removed_leave_no_trace(trace: Trace, data: st.DataObject) -> None:
    found = moments(trace)
    first = keys(data, found)
    second = [key for key in keys(data, found) if key not in first]
    before, us = found.with_reruns(tuple(first)).excess.copy(), found.us
    found.with_reruns(tuple(second))
    for key in second:
        found.remove(key)
    assert np.array_equal(found.excess, before) and abs(found.us - us) < 1e-6
    assert np.array_equal(moments(trace).with_reruns(tuple(sorted(first))).excess, before)


@settings(max_examples=40)
@given(traces(max_forward=12), st.data())
def test_restored_changes_leave_no_trace(trace: Trace, data: st.DataObject) -> None:
    found = moments(trace)
    first = keys(data, found)
    found.with_reruns(tuple(first))
    lists = [found.keys, found.reruns, *found.uses.values(), *found.versions.values()]
    before, beyond = [list(each) for each in lists], found.excess.copy()
    found.save()
    gone = [key for key in first if data.draw(st.booleans())]
    new = [key for key in keys(data, found) if key not in first]
    for key in gone:
        found.remove(key)
    found.with_reruns(tuple(new)).restore([*((False, key) for key in gone), *((True, key) for key in new)])
    assert lists == before and np.array_equal(found.excess, beyond)
    found.add(new[0]) if new else None
    assert np.array_equal(found.excess, moments(trace).with_reruns(tuple(sorted([*first, *new[:1]]))).excess)
