"""What lies at each moment is what the simulator says of the same re-runs, whichever came and went before."""

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
from passes.deep.phase_lp import Pieces
from passes.deep.rerun_state import RerunState
from passes.lp.problem import PlanProblem
from tests.passes.search.test_greedy import STEP
from tests.support.interpreter import run
from tests.support.strategies import traces

ALONE = Machine(0)


def moments(trace: Trace, budget: int = 0) -> RerunState:
    return RerunState(Pieces(PlanProblem(ReuseGaps(trace), replace(ALONE, budget=budget)), budget), budget)


def keys(data: st.DataObject, found: RerunState) -> list[int]:
    """Of some re-runs."""
    program = found.program
    again = [o for o in found.pieces.made if not program.producers[o].runs_once]
    assume(again and program.boundary < program.size)
    pair = st.tuples(st.sampled_from(again), st.integers(program.boundary, program.size - 1))
    return [place * found.stride + o for o, place in data.draw(st.lists(pair, max_size=8, unique=True))]


def said(found: RerunState) -> str:
    """The bytes at each moment; re-runs are in brackets."""
    words = []
    for key, nbytes in zip(found.keys, found.beyond, strict=True):
        position, o = divmod(key, found.stride)
        is_op = o == found.stride - 1
        words.append(
            f"{STEP.ops[position].name}:{nbytes}" if is_op else f"({found.program.producers[o].value}:{nbytes})"
        )
    return " ".join(words)


def test_what_runs_again_lies_there_until_it_is_read_last() -> None:
    found = moments(STEP)
    lines = [said(found)]
    for maker in (1, 0):
        found.add(found.program.gaps.index["r"] * found.stride + maker)
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
        patch.setattr(phase_lp, "CRUMBS", 0.0)
        found = moments(trace)
        found = found.with_runs(tuple(keys(data, found)))
        applied = apply(trace, found.plan())
    check(applied)
    forecast = predict(applied, ALONE)
    ran = {op.recomputes for op in applied.ops} - {""}
    assert abs(forecast.us - predict(trace, ALONE).us - found.us) < 1e-6
    drawn = sum(op.draws for op in trace.ops if op.name in ran)
    assert found.beyond.max() <= forecast.peak <= found.beyond.max() + 3 * drawn
    assert run(applied).computed == run(trace).computed


@settings(max_examples=100)
@given(traces(max_forward=12), st.data())
def test_what_came_and_went_leaves_no_trace(trace: Trace, data: st.DataObject) -> None:
    found = moments(trace)
    first = keys(data, found)
    second = [key for key in keys(data, found) if key not in first]
    before, us = found.with_runs(tuple(first)).beyond.copy(), found.us
    found.with_runs(tuple(second))
    for key in second:
        found.remove(key)
    assert np.array_equal(found.beyond, before) and abs(found.us - us) < 1e-6
    assert np.array_equal(moments(trace).with_runs(tuple(sorted(first))).beyond, before)


@settings(max_examples=40)
@given(traces(max_forward=12), st.data())
def test_what_is_taken_back_leaves_no_trace(trace: Trace, data: st.DataObject) -> None:
    found = moments(trace)
    first = keys(data, found)
    found.with_runs(tuple(first))
    lists = [found.keys, found.runs, *found.uses.values(), *found.made.values()]
    before, beyond = [list(each) for each in lists], found.beyond.copy()
    found.keep()
    gone = [key for key in first if data.draw(st.booleans())]
    new = [key for key in keys(data, found) if key not in first]
    for key in gone:
        found.remove(key)
    found.with_runs(tuple(new)).back([*((False, key) for key in gone), *((True, key) for key in new)])
    assert lists == before and np.array_equal(found.beyond, beyond)
    found.add(new[0]) if new else None
    assert np.array_equal(found.beyond, moments(trace).with_runs(tuple(sorted([*first, *new[:1]]))).beyond)
