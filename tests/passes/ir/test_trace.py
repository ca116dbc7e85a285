"""A step is a text: what is printed can be read back, and what can't be read is shown beside what can."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes import Op, Plan, Storage, Trace, apply, parse
from tests.support.strategies import planned, traces

# Every note that a line can have.
TEXT = """\
forward:
w = parameter()  # f32[4, 4] | makes w:64 | at layers.0.weight
x = input()  # f32[8, 4] | makes x:128
a = aten.mm.default(x, w)  # f32[8, 4] | makes a:128 | 10.5 us | workspace 4096 | at layers.0 model.py:12
v = aten.view.default(a)  # f32[32] | holds a
n = aten.native_dropout.default(v)  # f32[32], b8[32] | makes n.0:128, n.1:32 | 3.0 us | draws 5056 | at it = f(x)  # once | at 3
g = getitem(n)  # f32[32] | holds n.0
u = aten.copy_.default(w, a)  # f32[4, 4] | holds w | once
r = aten.unbind.default(n, a)  # holds n.1, a
backward:
t = tangent()  # f32[8, 4] | makes t:128
g__1 = getitem(n)  # f32[32] | holds n.0 | recomputes g
e = aten.mul.Tensor(t, g__1)  # makes e:128
update:
s = SGD.step(e)
return output g, gradient e
"""

words = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=30).map(str.strip)


def test_a_step_prints_as_it_was_read() -> None:
    assert str(parse(TEXT)) == TEXT


def test_every_note_is_read() -> None:
    trace = parse(TEXT)
    where = "it = f(x)  # once | at 3"
    made = (Storage("n.0", 128), Storage("n.1", 32))
    assert trace.op["n"] == Op(
        "n", "aten.native_dropout.default", ("v",), made, ("n.0", "n.1"), us=3.0, draws=5056, type="f32[32], b8[32]", where=where
    )  # fmt: skip
    assert trace.op["a"].workspace == 4096
    assert trace.op["u"].once and trace.op["u"].holds == ("w",)
    assert trace.op["g__1"].recomputes == "g"
    assert [op.phase for op in trace.ops].count("backward") == 3
    assert trace.op["s"].phase == "update"
    assert trace.outputs == (("output", "g"), ("gradient", "e"))


def test_spaces_and_empty_lines_do_not_matter() -> None:
    assert parse("\n\n".join(f"    {line}  " for line in TEXT.splitlines())) == parse(TEXT)


def test_a_step_of_nothing_is_a_step() -> None:
    assert parse("") == Trace(()) == parse("return\n") == parse(str(Trace(())))


def test_backward_begins_at_its_first_op() -> None:
    assert parse(TEXT).boundary == 8
    assert parse("a = f()\nb = g(a)").boundary == 2


def test_an_op_has_the_bytes_of_all_that_it_makes() -> None:
    trace = parse(TEXT)
    assert (trace.op["n"].nbytes, trace.op["g"].nbytes) == (160, 0)
    assert trace.nbytes == {"w": 64, "x": 128, "a": 128, "n.0": 128, "n.1": 32, "t": 128, "e": 128}


def test_inputs_are_known_by_their_kind() -> None:
    assert [op.name for op in parse(TEXT).ops if op.is_input] == ["w", "x", "t"]


@given(traces())
def test_what_is_printed_is_read_back(trace: Trace) -> None:
    assert parse(str(trace)) == trace


@given(planned())
def test_what_a_plan_makes_of_a_step_is_read_back(both: tuple[Trace, Plan]) -> None:
    applied = apply(*both)
    assert parse(str(applied)) == applied


@given(traces(max_forward=3), words, st.floats(min_value=0, allow_infinity=False))
def test_any_place_and_any_time_are_read_back(trace: Trace, where: str, us: float) -> None:
    odd = replace(trace, ops=tuple(replace(op, where=where, us=us) for op in trace.ops))
    assert parse(str(odd)) == odd


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a = ",
        "= mm(b)",
        "a = mm",
        "a = mm(b",
        "a == mm(b)",
        "a = mm(b) # f32[2]",
        "sideways:",
        "returns a",
        "a = b c()",
        "a = mm(x)  # makes a",
        "a = mm(x)  # makes a:many",
        "a = mm(x)  # workspace much",
        "a = mm(x)  # long us",
    ],
)
def test_what_is_no_line_is_shown_beside_one(line: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse(f"x = input()\n{line}\n")
    assert str(raised.value) == (
        f"not a line of a trace: {line.strip()!r}\nwrite e.g.: a = aten.mm.default(x, w)  # f32[8, 16] | makes a:512 | 10.0 us"
    )


def test_the_line_that_an_error_shows_is_a_line() -> None:
    with pytest.raises(ValueError) as raised:
        parse("?")
    assert str(parse(str(raised.value).rpartition("e.g.: ")[2]).op["a"].makes[0]) == "a:512"


@given(words)
def test_any_text_is_a_step_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert parse(str(parse(text))) == parse(text)
