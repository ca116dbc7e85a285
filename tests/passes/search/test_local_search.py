"""Plans are made better one storage at a time: what a point leans to first, and nothing that does not fit or is slower."""

from __future__ import annotations

import math
from dataclasses import replace

from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import Link, Machine, apply, check, parse
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp.model import PlanModel
from passes.lp.problem import PlanProblem
from passes.lp.relax import relax
from passes.lp.rounding import lp_preferences
from passes.schedule.candidate import make_candidate
from passes.schedule.schedule import Placement
from passes.search.optimize import local_search

MIB = 1 << 20
WAYS = (Placement.KEEP, Placement.RECOMPUTE, Placement.OFFLOAD)
CHAIN = parse(f"""
    forward:
    x = input()  # u8[10] | makes x:10
    d = tangent()  # u8[4] | makes d:4
    a = f(x)  # u8[{MIB}] | makes a:{MIB} | 400.0 us
    b = f(a)  # u8[{MIB}] | makes b:{MIB} | 100.0 us
    c = f(b)  # u8[{2 * MIB}] | makes c:{2 * MIB} | 100.0 us
    o = f(c)  # u8[4] | makes o:4 | 100.0 us
    backward:
    p = g(d, c)  # u8[100] | makes p:100 | 100.0 us
    q = g(p, b)  # u8[100] | makes q:100 | 100.0 us
    r = g(q, a)  # u8[100] | makes r:100 | 100.0 us
    return output o, gradient r
""")
GAPS = ReuseGaps(CHAIN)
LINKED = Machine(4 * MIB - MIB // 2, link=Link(out=1e4, back=1e4))


def program(machine: Machine) -> PlanProblem:
    return PlanProblem(GAPS, machine)


def test_a_point_leans_to_what_it_has_most_bytes_of() -> None:
    model = PlanModel(program(LINKED), LINKED.budget)
    relaxed = relax(model)
    assert relaxed is not None and relaxed.solution is not None
    said = "\n".join(f"{storage} {fate.value}" for storage, fate in lp_preferences(model, relaxed.solution))
    assert_expected_inline(
        said,
        """\
c keep
b keep
a offload
a keep""",
    )


def test_a_plan_without_offload_comes_to_what_the_program_leans_to() -> None:
    start = make_candidate(GAPS, LINKED, dict.fromkeys("ab", Placement.RECOMPUTE))
    found = local_search(program(LINKED), start, 10, math.inf, [("a", Placement.OFFLOAD), ("b", Placement.KEEP)])
    said = "\n".join(map(str, (*start.plan, start.forecast, "->", *found.plan, found.forecast)))
    assert_expected_inline(
        said,
        """\
recompute a: before q
recompute b: before q
3145738 bytes at c, 1500 us
->
recompute a: before r
3145846 bytes at p, 1400 us""",
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(WAYS), min_size=3, max_size=3),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(WAYS)), max_size=8),
    st.integers(0, 12),
    st.sampled_from([10.0, 1e3, 1e5]),
)
def test_no_try_makes_a_plan_slower_or_too_large(
    first: list[Placement], wanted: list[tuple[str, Placement]], tries: int, rate: float
) -> None:
    machine = replace(LINKED, link=replace(LINKED.link, out=rate, back=rate))
    start = make_candidate(GAPS, machine, dict(zip("abc", first, strict=True)))
    machine = replace(machine, budget=start.peak)
    found = local_search(program(machine), start, tries, math.inf, wanted)
    check(apply(CHAIN, found.plan))
    assert found.peak <= machine.budget
    assert found.forecast.us <= start.forecast.us
