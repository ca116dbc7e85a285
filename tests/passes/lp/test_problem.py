"""A trace as numbers: when the operands of recomputation are first and last needed."""

from __future__ import annotations

from passes import Machine, parse
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp.problem import PlanProblem

STEP = parse("""
    forward:
    x = input()  # makes x:8
    d = tangent()  # makes d:8
    a = f(x)  # makes a:8 | 1.0 us
    b = f(a)  # makes b:8 | 1.0 us
    c = f(a)  # makes c:8 | 1.0 us
    e = f(c)  # makes e:8 | 1.0 us
    n = once(e)  # makes n:8 | 1.0 us | once
    m = f(n)  # makes m:8 | 1.0 us
    backward:
    g = f(d, e)  # makes g:8
    h = f(g, b)  # makes h:8
    i = f(h, n)  # makes i:8
    return gradient i
""")


def test_a_storage_is_needed_when_backward_reads_it_or_recomputes_with_it() -> None:
    """Only c and a are never read by backward; m has no user, and n may not run again."""
    program = PlanProblem(ReuseGaps(STEP), Machine(0))
    place = program.gaps.trace.index | {"never": program.size}
    items, makers = program.first_needs, program.first_reruns
    names = [item.storage for item in program.storages]
    assert names == ["a", "b", "c", "e", "n", "m"]
    first = dict(zip(names, items, strict=True))
    assert first == {name: place[at] for name, at in zip(names, ("g", "h", "g", "g", "i", "never"), strict=True)}
    assert makers == items  # each makes one
    last = dict(zip(names, program.last_needs, strict=True))
    assert last == {name: place[at] for name, at in zip(names, ("h", "h", "g", "g", "i", "never"), strict=True)}


def test_a_producer_has_run_again_when_all_that_may_need_it_have() -> None:
    """a is needed at g, where c is recomputed, but b may need it at h."""
    program = PlanProblem(ReuseGaps(STEP), Machine(0))
    place = program.gaps.trace.index | {"never": program.size}
    settled = dict(zip((maker.value for maker in program.producers), program.last_reruns, strict=True))
    names = {"a": "h", "b": "h", "c": "g", "e": "g", "n": "i", "m": "never"}
    assert settled == {name: place[at] for name, at in names.items()}
