"""A hard limit of the system, not of our own counting."""

from __future__ import annotations

import sys

import pytest

from benchmarks.limit import run_child

LAYERS, BATCH, BUDGET = 4, 16, 360_000_000


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts private memory on Linux only")
def test_eager_dies_of_a_limit_under_which_memgraph_finishes() -> None:
    code, last = run_child("eager", LAYERS, BATCH, BUDGET)
    assert code != 0 and "can't allocate memory" in last
    code, last = run_child("memgraph", LAYERS, BATCH, BUDGET)
    assert code == 0, last
