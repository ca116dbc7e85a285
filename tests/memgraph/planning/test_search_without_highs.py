"""Where highspy is not installed, whatever was planned says so, what that means, and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import memgraph
from passes.lp import solver
from tests.support.models import batch, net

SAID = "highspy is not installed"


def report(share: float) -> memgraph.Report:
    """The plan for so much of what the step needs."""
    room = memgraph.plan(net(), batch(), budget="1GB").peak
    return memgraph.plan(net(), batch(), budget=int(share * room), offload=None)


def sweep() -> memgraph.Sweep:
    return memgraph.sweep(net(), batch(), offload=None, time_limit=0)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "highspy", None)


@pytest.mark.usefixtures("absent")
def test_the_report_says_who_planned_that_nothing_is_proven_and_what_to_install() -> None:
    found = report(0.9)
    assert found.plan and found.bound_us == 0.0
    lines = str(found).splitlines()
    at = lines.index(f"{SAID}: the greedy planner made this plan, and proves no bound; pip install highspy")
    assert lines[at - 1].startswith("proven: only that no plan is faster than the step as it is")


@pytest.mark.long
@pytest.mark.usefixtures("absent")
def test_a_step_that_fits_as_it_is_needs_no_search() -> None:
    assert SAID not in str(report(1.0))


@pytest.mark.usefixtures("absent")
def test_the_table_of_budgets_says_it_once() -> None:
    lines = str(sweep()).splitlines()
    assert lines[1] == f"{SAID}: greedy plans, without a proven bound; pip install highspy"
    assert sum(SAID in line for line in lines) == 1


@pytest.mark.long
@pytest.mark.usefixtures("absent")
def test_so_does_a_budget_that_is_too_small() -> None:
    with pytest.raises(memgraph.BudgetError, match=f"{SAID}: with it a smaller budget may do; pip install highspy\n"):
        report(0.01)


@pytest.mark.long
@pytest.mark.parametrize("planned", [lambda: report(0.9), sweep])
def test_with_it_no_message_mentions_it(planned: Callable[[], object]) -> None:
    assert SAID not in str(planned())
    with pytest.raises(memgraph.BudgetError) as caught:
        report(0.01)
    assert SAID not in str(caught.value)
