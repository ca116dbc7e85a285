"""With state that may be offloaded, the bound and the search for a plan have separate work limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from passes import Link, Machine, Streaming, apply, parse, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.ir.trace import Trace
from passes.lp import problem, state_vars
from passes.lp.linear_program import INFINITY
from passes.lp.model import PlanModel
from passes.lp.problem import PlanProblem
from passes.lp.relax import relax
from passes.lp.solver import LPSolver
from passes.schedule.candidate import make_candidate
from passes.search import optimize
from passes.search.greedy import greedy_from

LAYERS = 8
SLOW = Machine(0, link=Link(out=20.0, back=20.0, half_duplex=True), streaming=Streaming(enabled=True, window=100))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_vars, "SMALLEST_STREAMED", 1)
    monkeypatch.setattr(problem, "SMALLEST_OFFLOAD", 1)


def chain() -> Trace:
    """Layers of a parameter each: what one makes is read by the next one, and in backward by two ops."""
    layers = range(LAYERS)
    ahead = [f"a{k} = f(a{k - 1}, w{k})  # u8[1000] | makes a{k}:1000 | 10.0 us" for k in layers]
    behind = [
        f"dw{k} = g(p{k + 1}, a{k - 1})  # u8[800] | makes dw{k}:800 | 10.0 us\n"
        f"p{k} = h(p{k + 1}, a{k}, w{k})  # u8[100] | makes p{k}:100 | 10.0 us"
        for k in reversed(layers)
    ]
    inputs = [f"w{k} = parameter()  # u8[800] | makes w{k}:800" for k in layers]
    lines = [
        *inputs,
        "a-1 = input()  # u8[100] | makes a-1:100",
        f"p{LAYERS} = tangent()  # u8[100] | makes p{LAYERS}:100",
    ]
    text = "\n".join(["forward:", *lines, *ahead, "backward:", *behind]).replace("a-1", "x")
    return parse(f"{text}\nreturn output a{LAYERS - 1}, " + ", ".join(f"gradient dw{k}" for k in layers))


def tight(trace: Trace, share: float = 0.5) -> Machine:
    floor = PlanProblem(ReuseGaps(trace), SLOW).floor.max()
    return replace(SLOW, budget=int(floor + share * (predict(trace, SLOW).peak - floor)))


def test_a_problem_without_offloaded_activations_offloads_state_alone() -> None:
    trace = chain()
    home = PlanProblem(ReuseGaps(trace), SLOW, offloads_activations=False)
    assert home.states == PlanProblem(ReuseGaps(trace), SLOW).states != ()
    assert any(item.can_offload for item in PlanProblem(ReuseGaps(trace), SLOW).storages)
    assert not any(item.can_offload for item in home.storages)


def test_what_takes_more_work_than_there_is_has_no_answer_and_says_so() -> None:
    linear = LPSolver()
    columns = [linear.add_column(cost=1.0 + k, most=INFINITY) for k in range(30)]
    for k in range(29):
        linear.add_row(1.0, INFINITY, {columns[k]: 1.0, columns[k + 1]: 0.5})
    linear.highs.setOptionValue("presolve", "off")
    assert linear.solve(work=0.0) is None
    assert linear.out_of_work
    assert linear.solve() is not None
    assert not linear.out_of_work
    assert linear.relax_work > 0


@pytest.mark.parametrize("work", [0.0, 1e3, 1e4, 1e5])
def test_what_is_proven_with_less_work_is_no_more(work: float) -> None:
    trace = chain()
    machine = tight(trace, 0.2)
    whole = relax(PlanModel(PlanProblem(ReuseGaps(trace), machine), machine.budget))
    part = relax(PlanModel(PlanProblem(ReuseGaps(trace), machine), machine.budget), work)
    assert whole and whole.solution and not whole.out_of_work
    assert part and part.solution
    assert part.any_us == whole.any_us
    assert part.any_us <= part.solution.us <= whole.solution.us + 1e-6


def test_a_plan_is_found_without_the_work_that_a_proof_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = chain()
    machine = tight(trace, 0.8)
    monkeypatch.setattr(optimize, "PROVING", 0.0)
    found = optimize.optimize(trace, machine)
    assert predict(apply(trace, found.plan), machine).peak <= machine.budget
    assert found.bound_us == found.any_us


def test_what_mends_a_plan_ends_after_so_many_ops() -> None:
    trace = chain()
    gaps, machine = ReuseGaps(trace), replace(SLOW, budget=0)
    plain = make_candidate(gaps, machine, {})
    peaks = [greedy_from(gaps, machine, plain, ops=ops).peak for ops in (0, 1, 200, INFINITY)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] == plain.peak > peaks[1] > peaks[-1]
