"""HiGHS ends at a signal of the user, in the simplex as well as in a search, and prints nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from passes.lp.solver import LPSolver, SearchLimits

SOON = 0.1  # seconds: both programs take several times as long
LIMITS = SearchLimits(0.0, 1e30, 0.0, 1e30, nodes=1 << 30)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Send the process a signal whose handler raises, as that of Ctrl-C does, while HiGHS runs."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def covering(columns: int, rows: int) -> LPSolver:
    """Return a program of random rows that all have to be covered."""
    lp, random = LPSolver(), np.random.default_rng(0)
    for cost in random.random(columns):
        lp.add_column(cost=1.0 + float(cost))
    for _ in range(rows):
        chosen = random.choice(columns, 40, replace=False)
        lp.add_row(10.0 + random.random(), 1e30, {int(column): float(random.random()) for column in chosen})
    return lp


def test_a_signal_ends_the_simplex(ctrl_c: None) -> None:
    lp = covering(700, 500)
    lp._flush()  # which is Python, and would be interrupted
    signal.setitimer(signal.ITIMER_REAL, SOON)
    with pytest.raises(KeyboardInterrupt):
        lp.solve()
    assert lp.highs.getInfo().simplex_iteration_count <= 0  # of a run that has ended


def test_a_signal_ends_a_search(ctrl_c: None) -> None:
    lp = covering(600, 400)
    lp.solve()
    signal.setitimer(signal.ITIMER_REAL, SOON)
    with pytest.raises(KeyboardInterrupt):
        lp.solve_integers(range(600), {}, LIMITS)


def test_nothing_is_printed_where_highs_names_its_version() -> None:
    """A stand-in prints as HiGHS 1.16 does, from C, through its buffer."""
    code = """
import ctypes
from unittest import mock
from passes.lp import solver
real = solver.highspy.Highs
def loud():
    ctypes.CDLL(None).puts(b"Running HiGHS")
    return real()
print("before")
with mock.patch.object(solver.highspy, "Highs", loud):
    solver.LPSolver()
print("after")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "before\nafter\n"
