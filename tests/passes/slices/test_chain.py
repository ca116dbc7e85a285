"""Chains: what grows around a value, what is absorbed between, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import Trace, parse
from passes.slices.chain import find_chains
from passes.slices.row_rule import RowFacts, parse_rule, rows_of, type_shape
from passes.slices.slice import Slice
from tests.support.row_traces import HEAD, facts_of, row_steps, wide_values


def chains(trace: Trace, seed: str, parts: int = 2, **other: RowFacts) -> str:
    return "\n".join(map(str, find_chains(trace, facts_of(trace, **other), seed, parts)))


def by_rows(trace: Trace, seed: str, **other: RowFacts) -> str:
    """Return the chain in which dimension 0 of the seed is rows."""
    found = find_chains(trace, facts_of(trace, **other), seed, 2)
    return "\n".join(str(cut) for cut in found if cut.rule[seed].makes == (0, 1))


def test_a_head_and_its_loss_are_a_chain_by_rows_and_one_by_columns() -> None:
    assert_expected_inline(
        chains(HEAD, "a"),
        """\
slice 16 rows in 2 parts: a[1:2<-,1:2] b[1:2<1:2] c[1:2<1:2,-] l[+<1:2] d[1:2<-,1:2] e[1:2<1:2,1:2] dh[+<1:2,0:1] dw[1:2<-,1:2]
slice 8 rows in 2 parts: h[0:1<0:1] a[0:1<0:1,-] b[0:1<0:1] c[0:1<0:1,0:1] l[+<0:1] d[0:1<-,0:1] e[0:1<0:1,0:1] dh[0:1<0:1,-] h_t[1:2<0:1] dw[+<1:2,0:1] dx[0:1<0:1,0:1]
slice 8 rows in 2 parts: a[1:2<-,1:2] b[1:2<1:2] c[1:2<1:2,-] l[+<1:2] d[1:2<-,1:2] e[1:2<1:2,1:2] dh[+<1:2,0:1] dw[1:2<-,1:2]""",
    )


def test_a_seed_without_rules_has_no_chain() -> None:
    assert chains(HEAD, "a", a=RowFacts()) == ""


def step(*lines: str, returned: str = "output e") -> Trace:
    """Return a step whose values, of 8 rows of 16, are large, and u and v small."""
    return parse("\n".join([
        "forward:", "x = input()  # f32[8, 16] | makes x:512", "a = relu(x)  # f32[8, 16] | makes a:512", *lines,
        f"return {returned}",
    ]))  # fmt: skip


LARGE, SMALL = "f32[8, 16] | makes {}:512", "f32[8, 1] | makes {}:32"


def line(name: str, fn: str, *reads: str, small: bool = False) -> str:
    return f"{name} = {fn}({', '.join(reads)})  # {(SMALL if small else LARGE).format(name)}"


BY_ROW = RowFacts((parse_rule("0:1<0:1"),))


def test_ops_between_two_of_the_chain_belong_to_it() -> None:
    """u and v have few bytes, and e is read with what is made of them."""
    trace = step(line("u", "narrow", "a", small=True), line("v", "narrow", "u", small=True), line("e", "add", "a", "v"))
    assert by_rows(trace, "a", u=BY_ROW, v=BY_ROW) == (
        "slice 8 rows in 2 parts: a[0:1<0:1] u[0:1<0:1] v[0:1<0:1] e[0:1<0:1,0:1]"
    )


def test_a_chain_around_an_op_that_mixes_rows_is_refused() -> None:
    trace = step(line("u", "narrow", "a", small=True), line("v", "mixed", "u", small=True), line("e", "add", "a", "v"))
    assert by_rows(trace, "a", u=BY_ROW, v=BY_ROW) != ""
    assert chains(trace, "a", u=BY_ROW) == chains(trace, "e", u=BY_ROW) == ""


def test_an_op_that_mixes_rows_ends_a_chain() -> None:
    trace = step(line("b", "neg", "a"), line("m", "mixed", "b"), line("e", "neg", "m"))
    assert by_rows(trace, "a") == "slice 8 rows in 2 parts: a[0:1<0:1] b[0:1<0:1]"
    assert by_rows(trace, "e") == "slice 8 rows in 2 parts: e[0:1<0:1]"


def test_small_values_do_not_lead_a_chain_on() -> None:
    trace = step(line("u", "narrow", "a", small=True), line("v", "narrow", "u", small=True), returned="output v")
    assert by_rows(trace, "a", u=BY_ROW, v=BY_ROW) == "slice 8 rows in 2 parts: a[0:1<0:1] u[0:1<0:1]"


def test_what_is_summed_over_rows_is_not_read_in_the_chain() -> None:
    """e needs the sum of all rows, which is there after the last part."""
    trace = step("s = total(a)  # f32[] | makes s:4", line("e", "scale", "s", "a"))
    assert chains(trace, "a") == ""


def test_sequences_of_two_lengths_are_in_no_chain() -> None:
    trace = step(
        "b = split(a)  # f32[2, 4, 16] | makes b:512",
        "c = split(a)  # f32[4, 2, 16] | makes c:512",
        returned="output b, output c",
    )
    other = {name: RowFacts((parse_rule("0:2<0:1"),)) for name in "bc"}
    none = RowFacts()
    assert by_rows(trace, "a", b=other["b"], c=none) == "slice 8 rows of 4 in 2 parts: a[0:1<0:1] b[0:2<0:1]"
    assert by_rows(trace, "a", b=none, c=other["c"]) == "slice 8 rows of 2 in 2 parts: a[0:1<0:1] c[0:2<0:1]"
    assert by_rows(trace, "a", **other) == ""


@settings(max_examples=60, deadline=None)
@given(trace=row_steps(), data=st.data())
def test_a_chain_is_of_ops_whose_rows_fit(trace: Trace, data: st.DataObject) -> None:
    facts = facts_of(trace)
    seed = data.draw(st.sampled_from(wide_values(trace)))
    for cut in find_chains(trace, facts, seed, 2):
        assert seed in cut.rule and [name for name, _ in cut.rules] == sorted(cut.rule, key=trace.index.__getitem__)
        for name, rule in cut.rules:
            op = trace.op[name]
            assert rule in facts(name).rules
            for value, dims in zip((name, *op.reads), (rule.makes, *rule.reads), strict=True):
                assert dims is None or rows_of(type_shape(trace.op[value].type), dims) % cut.rows == 0
            for read, dims in zip(op.reads, rule.reads, strict=True):
                assert read not in cut.rule or dims == cut.rule[read].makes is not None
        assert outside_between(trace, cut) == []


def outside_between(trace: Trace, cut: Slice) -> Sequence[str]:
    """Return the ops outside of a chain that read what depends on it, and on which it depends.

    Between a block in forward and one in backward there may be some.
    """
    before, behind = set[str](), set[str]()
    reads = {op.name: {r for r in op.reads if not cut.reruns or trace.op[r].phase == op.phase} for op in trace.ops}
    for op in trace.ops:
        if not {*cut.rule, *behind}.isdisjoint(reads[op.name]):
            behind.add(op.name)
    for op in reversed(trace.ops):
        if op.name in cut.rule or op.name in before:
            before.update(reads[op.name])
    return sorted((before & behind) - cut.rule.keys())
