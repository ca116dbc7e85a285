"""No cut of a random step ends a mini-batch before the bound, and the best cut of even layers ends it at the bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from passes import Trace
from passes.stages.cut import best_cut
from passes.stages.interval_costs import IntervalCosts
from passes.stages.makespan import least_makespan
from passes.stages.pipeline_schedule import PipelineSchedule
from passes.stages.places import Places
from passes.stages.timeline import StageTimes
from tests.support.strategies import traces

from .test_cut import SKIP, SUMS, without_update


@given(traces(25).map(without_update), st.data(), st.integers(1, 7), st.sampled_from(["1f1b", "gpipe"]))
def test_no_cut_ends_before_the_bound(trace: Trace, data: st.DataObject, chunks: int, name: str) -> None:
    costs = IntervalCosts(Places(trace))
    cells = len(costs.borders) - 1
    assume(cells > 1)
    count = data.draw(st.integers(1, min(4, cells)))
    inner = data.draw(st.lists(st.integers(1, cells - 1), min_size=count - 1, max_size=count - 1, unique=True))
    at = [0, *sorted(inner), cells]
    recomputed = data.draw(st.lists(st.sampled_from([0.0, 3.0]), min_size=count, max_size=count))
    times = [
        StageTimes(float(costs.forward_us[i, j]), float(costs.backward_us[i, j]) + more, recompute=more)
        for i, j, more in zip(at, at[1:], recomputed, strict=False)
    ]
    schedule = PipelineSchedule(name, count, chunks)
    forwards = [schedule.open_forwards(stage) for stage in range(count)]
    least = least_makespan(costs, [math.inf] * count, forwards, chunks)
    assert schedule.timeline(times).us >= least - 1e-6 * least


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_one_stage_takes_what_the_bound_says(chunks: int) -> None:
    costs = IntervalCosts(Places(SKIP, SUMS))
    assert least_makespan(costs, [math.inf], [1], chunks) == chunks * float(costs.us[0, -1])
    assert least_makespan(costs, [10], [1], chunks) == math.inf


def test_forward_and_backward_are_the_whole_time() -> None:
    costs = IntervalCosts(Places(SKIP, SUMS))
    assert np.allclose(costs.us, costs.forward_us + costs.backward_us)
    assert best_cut(costs, [math.inf], [1]).us == (float(costs.us[0, -1]),)
