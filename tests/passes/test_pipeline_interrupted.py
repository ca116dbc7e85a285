"""A KeyboardInterrupt ends the search with the best plan that fits, if that is asked for and there is one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from passes import Link, Machine, Plan, Proposal, Recompute, Trace, make_plan
from passes.pipeline import PASSES, Pass
from passes.search import optimize as optimizing
from passes.search.optimize import optimize, optimize_no_offload
from passes.simulate.plan_result import SearchInterrupted
from tests.passes.test_pipeline import FLOOR, PEAK, STEP

Find = Callable[[Trace, Machine, float], Plan | Proposal]
FITS: Plan = (Recompute("a", "q"),)
TIGHT = Machine(PEAK - 1)


def finds(plan: Plan | Proposal) -> Pass:
    return Pass(lambda trace, machine, until: plan)


def presses(times: list[str]) -> Pass:
    """Return a pass in which the user presses Ctrl-C."""

    def pressed(trace: Trace, machine: Machine, until: float) -> Plan:
        times.append("pressed")
        signal.raise_signal(signal.SIGINT)
        return ()

    return Pass(pressed)


def never(trace: Trace, machine: Machine, until: float) -> Plan:
    raise AssertionError("the search has ended")


def test_the_best_plan_until_then_is_taken_and_no_further_pass_runs() -> None:
    result = make_plan(STEP, TIGHT, (finds(FITS), presses([]), Pass(never)), interruptible=True)
    assert result.plan == FITS and result.interrupted
    assert result.forecast.peak <= TIGHT.budget


def test_without_a_plan_that_fits_an_interrupt_is_raised() -> None:
    with pytest.raises(KeyboardInterrupt):
        make_plan(STEP, TIGHT, (presses([]), finds(FITS)), interruptible=True)
    with pytest.raises(KeyboardInterrupt):
        make_plan(STEP, Machine(FLOOR - 1), (finds(FITS), presses([])), interruptible=True)


def test_an_interrupt_is_raised_where_nobody_asked_for_the_best_plan() -> None:
    with pytest.raises(KeyboardInterrupt):
        make_plan(STEP, TIGHT, (finds(FITS), presses([])))


def test_a_search_that_is_not_interrupted_does_not_say_so() -> None:
    assert not make_plan(STEP, TIGHT, interruptible=True).interrupted


def test_a_second_interrupt_is_raised() -> None:
    def logged(name: str, best: Any) -> None:
        if best.interrupted:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make_plan(STEP, TIGHT, (finds(FITS), presses([])), log=logged, interruptible=True)


def test_an_interrupted_pass_hands_over_the_plan_that_it_has() -> None:
    def halfway(trace: Trace, machine: Machine, until: float) -> Plan:
        raise SearchInterrupted(Proposal(FITS, bound_us=3.0))

    result = make_plan(STEP, TIGHT, (Pass(halfway), Pass(never)), interruptible=True)
    assert result.plan == FITS and result.interrupted and result.bound_us == 3.0


@pytest.mark.parametrize("link", [Link(), Link(out=10.0, back=10.0)])
def test_the_linear_program_hands_over_what_it_has_rounded(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("highspy")
    machine = Machine(PEAK - 1, link=link)
    whole = optimize(STEP, machine)
    assert whole.plan

    def polished(self: optimizing.Optimizer, ended: bool = False) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizing.Optimizer, "_polish", polished)
    with pytest.raises(SearchInterrupted) as interrupt:
        optimize(STEP, machine)
    assert interrupt.value.proposal.plan
    assert interrupt.value.proposal.bound_us <= whole.bound_us
    result = make_plan(STEP, machine, PASSES, interruptible=True)
    assert result.interrupted and result.forecast.peak <= machine.budget


def test_a_search_without_offload_proves_nothing_of_plans_that_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("highspy")
    monkeypatch.setattr(optimizing.Optimizer, "_polish", lambda self, ended=False: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SearchInterrupted) as interrupt:
        optimize_no_offload(STEP, Machine(PEAK - 1, link=Link(out=10.0, back=10.0)))
    assert interrupt.value.proposal.plan
    assert (interrupt.value.proposal.bound_us, interrupt.value.proposal.any_us) == (0.0, 0.0)


def test_an_interrupt_before_any_plan_is_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("highspy")
    monkeypatch.setattr(optimizing.Optimizer, "_searched", lambda self: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as interrupt:
        optimize(STEP, TIGHT)
    assert not isinstance(interrupt.value, SearchInterrupted)
