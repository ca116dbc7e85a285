"""A storage is on the device from the op that makes it to the last op that reads any value that holds it."""

from __future__ import annotations

from expecttest import assert_expected_inline
from hypothesis import given

from passes import Plan, Trace, apply, lifetimes, parse
from passes.ir.liveness import released
from tests.support.interpreter import run
from tests.support.strategies import planned, traces


def lives(text: str) -> str:
    """A line a storage: from which op to which, its kind, and how that looks."""
    trace = parse(text)
    width = len(trace.ops)
    lines = []
    for life in lifetimes(trace):
        bar = "".join("#" if life.first <= i <= life.last else "." for i in range(width))
        lines.append(
            f"{bar}  {life.storage} {life.kind} {life.nbytes}"
            + f" of {life.producer}" * (life.producer != life.storage)
        )
    return "\n".join(lines) + "\n"


def test_a_view_keeps_its_base() -> None:
    text = """
        a = f()  # makes a:8
        v = view(a)  # holds a
        w = view(v)  # holds a
        b = g(a)  # makes b:8
        c = g(w)  # makes c:8
        e = g(b)  # makes e:8
    """
    assert_expected_inline(
        lives(text),
        """\
#####.  a temporary 8
...###  b temporary 8
....#.  c temporary 8
.....#  e temporary 8
""",
    )


def test_inputs_and_what_is_handed_out_stay() -> None:
    text = """
        forward:
        w = parameter()  # makes w:8
        m = buffer()  # makes m:8
        x = input()  # makes x:8
        s = state()  # makes s:8
        p = gradient()  # makes p:8
        d = tangent()  # makes d:8
        a = f(x)  # makes a:8
        v = view(a)  # holds a
        b = g(a)  # makes b:8
        backward:
        e = h(d, b)  # makes e:8
        q = accumulate(p, e)  # holds p
        i = h(e)  # makes i:8
        update:
        u = sgd(s, q)
        return output v, gradient q, gradient i
    """
    assert_expected_inline(
        lives(text),
        """\
#############  w parameter 8
#############  m buffer 8
#############  x input 8
#############  s state 8
#############  p gradient 8
.........####  d tangent 8
......#######  a output 8
........##...  b activation 8
.........###.  e temporary 8
...........##  i gradient 8
""",
    )


def test_what_is_released_goes_when_forward_ends_or_when_it_was_read() -> None:
    text = """
        forward:
        d = tangent()  # f32[2] | makes d:8
        n = tangent()  # f32[] | makes n:4
        a = f()  # f32[2] | makes a:8
        b = f()  # f32[2] | makes b:8
        c = f(b)  # f32[] | makes c:4
        backward:
        g = h(d, n)  # makes g:8
        e = h(g, b)  # makes e:8
        i = h(g)  # makes i:8
        return output a, output b, output c, gradient e
    """
    assert_expected_inline(
        lives(str(released(parse(text)))),
        """\
.....#..  d tangent 8
.....###  n tangent 4
..###...  a output 8
...####.  b output 8
....####  c output 4
.....###  g temporary 8
......##  e gradient 8
.......#  i temporary 8
""",
    )


def test_each_item_of_an_op_with_several_has_its_own_lifetime() -> None:
    text = """
        forward:
        n = norm()  # makes n.0:80, n.1:8, n.2:1
        y = getitem(n)  # holds n.0
        r = getitem(n)  # holds n.1
        b = f(y)  # makes b:8
        backward:
        e = g(b, r)  # makes e:8
        return gradient e
    """
    assert_expected_inline(
        lives(text),
        """\
####.  n.0 temporary 80 of n
#####  n.1 activation 8 of n
###..  n.2 temporary 1 of n
...##  b activation 8
....#  e gradient 8
""",
    )


def test_a_value_that_no_op_reads_is_freed_behind_its_op() -> None:
    assert_expected_inline(
        lives("a = f()  # makes a:8\nb = f()  # makes b:8"),
        """\
#.  a temporary 8
.#  b temporary 8
""",
    )


def test_a_tangent_comes_with_backward_wherever_it_stands() -> None:
    first = "forward:\nd = tangent()  # makes d:8\na = f()  # makes a:8\nbackward:\nb = g()  # makes b:8\nc = g()"
    last = "forward:\na = f()  # makes a:8\nbackward:\nb = g()  # makes b:8\nd = tangent()  # makes d:8"
    assert_expected_inline(
        lives(first),
        """\
..##  d tangent 8
.#..  a temporary 8
..#.  b temporary 8
""",
    )
    assert_expected_inline(
        lives(last),
        """\
#..  a temporary 8
.#.  b temporary 8
.##  d tangent 8
""",
    )


def test_what_backward_reads_of_forward_is_an_activation() -> None:
    kinds = {life.storage: life.kind for life in lifetimes(parse("""
        forward:
        a = f()  # makes a:8
        b = f(a)  # makes b:8
        v = view(b)  # holds b
        o = memgraph.offload.default(b)
        backward:
        c = g(v)  # makes c:8
        r = memgraph.reload.default(o)  # makes r:8
        e = g(c)  # makes e:8
        return gradient e
    """))}  # fmt: skip
    assert kinds == {"a": "temporary", "b": "activation", "c": "temporary", "r": "activation", "e": "gradient"}


def held_bytes(trace: Trace) -> list[int]:
    """The bytes at every op, of lives and workspaces."""
    found = [op.workspace for op in trace.ops]
    for life in lifetimes(trace):
        for i in range(life.first, life.last + 1):
            found[i] += life.nbytes
    return found


@given(traces())
def test_lifetimes_are_what_python_holds(trace: Trace) -> None:
    assert held_bytes(trace) == run(trace).nbytes


@given(planned())
def test_lifetimes_of_a_planned_step_are_what_python_holds(both: tuple[Trace, Plan]) -> None:
    applied = apply(*both)
    assert held_bytes(applied) == run(applied).nbytes
