"""No division of a row into parts has a faster slowest part."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from passes.stages.cut import partition

TIMES = st.sampled_from([0.0, 1.0, 2.0, 5.0, 0.3])


@given(st.lists(TIMES, min_size=1, max_size=8), st.data())
def test_no_division_has_a_faster_slowest_part(times: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(times)))
    before = np.concatenate([[0.0], np.cumsum(times)])
    slowest, at = partition(before, parts)
    assert (at[0], at[-1], len(at)) == (0, len(times), parts + 1)
    assert all(i < j for i, j in itertools.pairwise(at))
    assert slowest == max(float(before[j] - before[i]) for i, j in itertools.pairwise(at))
    every = itertools.combinations(range(1, len(times)), parts - 1)
    best = min(max(float(before[j] - before[i]) for i, j in itertools.pairwise((0, *e, len(times)))) for e in every)
    assert slowest == best
