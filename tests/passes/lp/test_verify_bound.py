"""A bound is derived from dual values without a solver, and wrong dual values never prove more than is true."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import (
    BoundProof,
    BoundProofs,
    Link,
    Machine,
    PlanResult,
    Trace,
    make_plan,
    parse,
    parse_proofs,
    predict,
    proven_us,
)
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp.linear_program import INFINITY
from passes.lp.model import PlanModel
from passes.lp.problem import PlanProblem
from passes.lp.relax import relax
from passes.lp.solver import LPSolver
from passes.lp.verify_bound import least_objective
from tests.support.strategies import machines, traces

EXACT = 1e-6  # microseconds: HiGHS computes its objective in floats


def chain(layers: int = 8) -> Trace:
    """Layers of one expensive and one cheap op."""
    lines = ["x = input()  # makes x:1000000", "g0 = tangent()  # makes g0:1000000"]
    last = "x"
    for i in range(layers):
        lines += [
            f"a{i} = mm({last})  # makes a{i}:1000000 | {100 + 10 * i}.0 us",
            f"r{i} = relu(a{i})  # makes r{i}:1000000 | {7 + i}.0 us",
        ]
        last = f"r{i}"
    lines.append("backward:")
    gradient = "g0"
    for i in reversed(range(layers)):
        lines.append(f"d{i} = mm_backward({gradient}, r{i}, a{i})  # makes d{i}:1000000 | 200.0 us")
        gradient = f"d{i}"
    return parse("\n".join([*lines, f"return gradient {gradient}"]))


MACHINE = Machine(11_000_000, link=Link(out=2000.0, back=2000.0, staging=100_000))


@cache
def planned(machine: Machine = MACHINE) -> PlanResult:
    return make_plan(chain(), machine)


@pytest.mark.parametrize("budget", [8_500_000, 9_000_000, 11_000_000, 15_000_000])
@pytest.mark.parametrize("link", [Link(), MACHINE.link])
def test_the_bound_of_a_plan_is_derived_to_the_last_digits_where_a_linear_program_proved_it(
    budget: int, link: Link
) -> None:
    machine = Machine(budget, link=link)
    result = planned(machine)
    assert result.proofs.once is not None
    problem = PlanProblem(ReuseGaps(result.captured.trace), machine)
    relaxed = relax(model := PlanModel(problem, budget))
    assert relaxed is not None and relaxed.solution is not None
    least = relaxed.solution.us - model.columns.tie_us
    derived = proven_us(result.captured.trace, machine, result.proofs.once)
    assert least - EXACT <= derived <= result.bound_us + EXACT
    assert derived <= result.forecast.us - result.captured.us + EXACT


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_wrong_dual_values_never_prove_more_than_the_program_has(data: st.DataObject) -> None:
    """Law: whatever the dual values, what they prove is at most the least objective."""
    proof = planned().proofs.once
    assert proof is not None
    noise = data.draw(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=20))
    rows = data.draw(st.lists(st.integers(0, proof.row_count - 1), min_size=len(noise), max_size=len(noise)))
    wrong = replace(proof, duals={**proof.duals, **dict(zip(rows, noise, strict=True))})
    assert proven_us(planned().captured.trace, MACHINE, wrong) <= planned().bound_us + EXACT


@given(traces(), machines())
@settings(deadline=None, max_examples=40)
def test_no_plan_is_faster_than_what_is_derived(trace: Trace, machine: Machine) -> None:
    """Law: of any step that is planned, the derived bounds are below the plan, and at most those of the search."""
    captured = predict(trace, machine)
    tight = replace(machine, budget=max(1, captured.peak * 4 // 5))
    try:
        result = make_plan(trace, tight)
    except RuntimeError:
        return
    pairs = (result.proofs.once, result.bound_us), (result.proofs.any_plan, result.any_us)
    for proof, claimed in pairs:
        if proof is not None:
            derived = proven_us(result.captured.trace, tight, proof)
            assert derived <= max(0.0, claimed) + EXACT


def test_what_duals_prove_is_exact() -> None:
    lp = LPSolver()
    x, y = lp.add_column(0.1), lp.add_column(0.3, most=INFINITY)
    lp.add_row(1.0, INFINITY, {x: 1.0, y: 1.0})
    lp.add_row(-INFINITY, 0.7, {x: 1.0})
    rows = list(lp.rows)
    solution = lp.solve()
    assert solution is not None
    lp.rows = rows
    duals = {row: float(dual) for row, dual in enumerate(solution.duals)}
    found = least_objective(lp, duals, Fraction(10))
    assert isinstance(found, Fraction)
    assert float(found) == pytest.approx(0.7 * 0.1 + 0.3 * 0.3, abs=1e-12)


def test_a_proof_of_another_step_is_refused() -> None:
    proof = planned().proofs.once
    assert proof is not None
    with pytest.raises(ValueError, match="the proof is of"):
        proven_us(chain(7), MACHINE, replace(proof, added=()))
    with pytest.raises(ValueError, match="adds rows of op 900"):
        proven_us(chain(), MACHINE, replace(proof, added=(("once", 900),)))


def test_proofs_are_printed_and_read_back() -> None:
    for proofs in (BoundProofs(), planned().proofs, BoundProofs(any_plan=BoundProof.of([("any", 3)], np.ones(2)))):
        assert parse_proofs(str(proofs)) == proofs
