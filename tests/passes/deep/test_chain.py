"""A chain is undone section by section, as revolve would, and never over the budget if it says so."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import Machine, Trace, apply, check, parse, predict
from passes.analysis.chain_sections import Sections
from passes.analysis.reuse_gaps import ReuseGaps
from passes.deep.chain import rerun_chain
from passes.search.greedy import greedy_plan
from tests.support.interpreter import run
from tests.support.processes import printed
from tests.support.strategies import decoded, machines, traces

ALONE = Machine(0)


def plain(count: int) -> Trace:
    """A chain of equal ops: the backward of each reads what the op read.  One gradient is made of another."""
    lines = ["forward:", "x = input()  # makes x:1", "d = tangent()  # makes d:0"]
    lines += [
        f"a{i} = f({f'a{i - 1}' if i > 1 else 'x'})  # makes a{i}:{int(i < count)} | 1.0 us"
        for i in range(1, count + 1)
    ]
    lines += ["backward:", f"g{count + 1} = g(d)  # makes g{count + 1}:1 | 1.0 us"]
    lines += [
        f"g{i} = g(g{i + 1}, {f'a{i - 1}' if i > 1 else 'x'})  # makes g{i}:1 | 1.0 us" for i in range(count, 0, -1)
    ]
    return parse("\n".join([*lines, f"return output a{count}, gradient g1"]))


def revolve(steps: int, checkpoints: int) -> int:
    """The fewest forward steps to undo so many with so many checkpoints, the input being one (Griewank and Walther)."""
    rounds = next(r for r in range(steps) if math.comb(checkpoints + r, checkpoints) >= steps)
    return rounds * steps - (math.comb(checkpoints + rounds, checkpoints + 1) if rounds else 0)


def planned(trace: Trace, budget: int, machine: Machine = ALONE) -> tuple[Trace, int, float]:
    """The trace as it will run, its peak, and its time beyond that of the captured one."""
    applied = apply(trace, rerun_chain(trace, replace(machine, budget=budget)))
    check(applied)
    forecast = predict(applied, machine)
    return applied, forecast.peak, forecast.us - predict(trace, machine).us


def test_a_plain_chain() -> None:
    trace = plain(6)
    assert_expected_inline(
        "\n".join(
            f"{budget}:\n" + "\n".join(map(str, rerun_chain(trace, Machine(budget)))) for budget in (8, 7, 6, 5, 4)
        ),
        """\
8:

7:
recompute a4: before g5
6:
recompute a4: before g5
recompute a1: before g2
5:
recompute a4: before g5
recompute a1: before g3
recompute a2: before g3
4:
recompute a1: before g5
recompute a2: before g5
recompute a3: before g5
recompute a4: before g5
recompute a1: before g4
recompute a2: before g4
recompute a3: before g4
recompute a1: before g3
recompute a2: before g3
recompute a1: before g2""",
    )


@pytest.mark.parametrize("count", [4, 7, 12, 20, 33, 60])
@pytest.mark.parametrize("checkpoints", [1, 2, 3, 4, 6])
def test_a_chain_of_equal_ops_is_undone_as_revolve_does(count: int, checkpoints: int) -> None:
    trace = plain(count)
    budget = 3 + checkpoints  # the input, two gradients, and the first of the checkpoints for what the next op reads
    _, peak, us = planned(trace, budget)
    assert peak <= budget
    assert us == revolve(count, checkpoints) - (count - 1)


def test_sections_begin_where_forward_is_narrow() -> None:
    trace = parse("""
        forward:
        x = input()  # makes x:10
        d = tangent()  # makes d:1
        a = norm(x)  # makes a.0:10, a.1:1 | 1.0 us
        a0 = getitem(a)  # holds a.0
        a1 = getitem(a)  # holds a.1
        b = mm(a0)  # makes b:40 | 9.0 us
        v = view(b)  # holds b
        c = gelu(v)  # makes c:40 | 2.0 us
        e = mm(c)  # makes e:10 | 9.0 us
        f = add(e, x)  # makes f:10 | 1.0 us
        h = mm(f)  # makes h:1 | 3.0 us
        backward:
        g1 = mm_backward(d, f)  # makes g1:10 | 3.0 us
        g2 = mm_backward(g1, c)  # makes g2:40 | 9.0 us
        g3 = gelu_backward(g2, v)  # makes g3:40 | 2.0 us
        g4 = mm_backward(g3, a0)  # makes g4:10 | 9.0 us
        g5 = norm_backward(g4, x, a1)  # makes g5:10 | 1.0 us
        return output h, gradient g5
    """)
    sections = Sections(ReuseGaps(trace), 160)
    lines = []
    for j, (begin, end) in enumerate(itertools.pairwise(sections.cuts)):
        ops = " ".join(op.name for op in trace.ops[begin:end])
        backward = " ".join(trace.ops[i].name for i in sections.backward[j])
        lines.append(f"{ops}: from {sorted(sections.crossing[j])} keeps {sorted(sections.kept[j])} for {backward}")
    assert_expected_inline(
        "\n".join(lines),
        """\
x d a a0 a1: from [] keeps ['a.0', 'a.1'] for g5
b: from ['a.0'] keeps ['b'] for g4
v c: from ['b'] keeps ['c'] for g3
e f: from ['c'] keeps ['f'] for g2
h: from ['f'] keeps [] for g1""",
    )
    assert_expected_inline(
        "\n".join(map(str, rerun_chain(trace, Machine(130)))),
        """\
recompute a: before g3
recompute a0: before g3
recompute b: before g3
recompute v: before g3
recompute a: before g4
recompute a0: before g4
recompute a1: before g4""",
    )


@pytest.mark.parametrize("budget", range(4, 40, 5))
def test_a_chain_takes_no_longer_than_the_greedy_way_down(budget: int) -> None:
    trace = plain(40)
    greedy = predict(apply(trace, greedy_plan(trace, Machine(budget))), Machine(budget))
    _, peak, us = planned(trace, budget)
    assert peak <= budget
    assert us <= greedy.us - predict(trace, ALONE).us


def test_what_is_no_chain_is_left_alone() -> None:
    assert rerun_chain(plain(2), Machine(0)) == ()
    assert rerun_chain(Trace(()), Machine(-1)) == ()
    assert rerun_chain(parse("x = input()  # makes x:9\nreturn output x"), Machine(0)) == ()


@settings(max_examples=40)
@given(traces(), machines(), st.integers(0, 10))
def test_a_plan_changes_no_value_and_breaks_no_invariant(trace: Trace, machine: Machine, tenth: int) -> None:
    budget = predict(trace, machine).peak * tenth // 10
    applied, peak, _ = planned(trace, budget, machine)
    plain_run, decided = run(trace), run(applied)
    assert (decided.computed, decided.handed, decided.generator) == (
        plain_run.computed,
        plain_run.handed,
        plain_run.generator,
    )
    assert max(decided.nbytes) <= max(peak, budget)
    assert peak <= predict(trace, machine).peak


@settings(max_examples=20)
@given(traces(), machines())
def test_the_lowest_peak_is_a_budget_that_is_met_and_under_which_no_lower_one_is_found(
    trace: Trace, machine: Machine
) -> None:
    least = planned(trace, 0, machine)[1]
    assert planned(trace, least, machine)[1] == least


@settings(max_examples=20)
@given(traces(), machines())
def test_what_may_run_once_runs_once(trace: Trace, machine: Machine) -> None:
    whole = [op.makes and not op.is_input and op.fn != "aten.slice.default" for op in trace.ops]
    once = replace(trace, ops=tuple(replace(op, once=bool(alone)) for op, alone in zip(trace.ops, whole, strict=True)))
    assert not any(once.op[decision.value].once for decision in rerun_chain(once, machine))


PLAN_EACH = """
import sys
from passes import Machine, parse
from passes.deep.chain import rerun_chain
for text in sys.stdin.read().split("=====\\n"):
    print(*rerun_chain(parse(text), Machine(0)), sep="\\n", end="\\n\\n")
"""


def test_the_plan_does_not_depend_on_the_order_of_sets() -> None:
    """Sets of names iterate in another order in every process."""
    dice = random.Random(7)
    steps = [decoded([(dice.randbytes(10), dice.randbytes(10)) for _ in range(40)]) for _ in range(4)] + [plain(20)]
    here = printed(PLAN_EACH, steps)
    assert here.count("recompute") > 10
