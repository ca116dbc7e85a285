"""Backward ops that run in forward: only where each is linear in the tangent, and what they need is there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import Trace, parse
from passes.slices.chain import find_chains
from passes.slices.hoist import can_hoist, hoisted
from passes.slices.row_rule import RowFacts
from tests.support.row_traces import HEAD, facts_of, row_steps, run, wide_values

CHAIN = ("a", "b", "c", "l", "d", "e", "dh", "dw")
FACTS = facts_of(HEAD)


def changed(name: str, **facts: object) -> Trace:
    """Return the head with an op of other facts."""
    ops = tuple(replace(op, **facts) if op.name == name else op for op in HEAD.ops)  # type: ignore[arg-type]
    return Trace(ops, HEAD.outputs)


def test_what_a_chain_of_both_phases_takes() -> None:
    early = hoisted(HEAD, CHAIN)
    assert early is not None and can_hoist(HEAD, CHAIN, FACTS)
    assert early.tangent.name == "g"
    assert early.before == ("w_t", "h_t")  # views that stand in backward
    assert early.scales == {"dh", "dw"}  # what later ops read, or the step returns
    assert early.dropped == {"d", "e", "w_t", "h_t"}
    assert [str(op).partition("  #")[0] for op in early.prologue(HEAD)] == [
        "g__one = aten.ones.default()", "w_t__one = t(w)", "h_t__one = t(h)",
    ]  # fmt: skip
    assert str(early.scaled(HEAD.op["dh"])) == (
        "dh = memgraph_slices.scale_.default(dh__parts, g)  # f32[8, 4] | holds dh__parts | once | at head"
    )


def test_a_chain_of_one_phase_stays_there() -> None:
    assert hoisted(HEAD, ("a", "b", "c")) is None and can_hoist(HEAD, ("a", "b", "c"), FACTS)
    assert hoisted(HEAD, ("d", "e")) is None and can_hoist(HEAD, ("d", "e"), FACTS)


def test_a_second_slice_has_a_tangent_of_its_own() -> None:
    first = parse("o = aten.ones.default()  # f32[] | makes o:4\nreturn").ops
    early = hoisted(Trace((*first, *HEAD.ops), HEAD.outputs), CHAIN)
    assert early is not None and early.source("g") == "g__one2" and early.source("w_t") == "w_t__one2"


@pytest.mark.parametrize("name", ["d", "e", "dh", "dw"])
def test_what_is_not_linear_in_the_tangent_stays_in_backward(name: str) -> None:
    assert not can_hoist(HEAD, CHAIN, facts_of(HEAD, **{name: RowFacts(FACTS(name).rules)}))


def test_an_op_that_adds_something_else_is_not_linear() -> None:
    """e + a is not, though both together are."""
    plus = changed("e", fn="plus")
    assert not can_hoist(plus, CHAIN, facts_of(plus))
    doubled = changed("e", fn="plus", reads=("d", "d"))
    assert can_hoist(doubled, CHAIN, facts_of(doubled, e=RowFacts(linear=((0,), (0, 1)))))


def test_half_precision_may_underflow_without_the_scale_of_the_loss() -> None:
    assert not can_hoist(changed("e", type="f16[8, 16]"), CHAIN, FACTS)
    assert can_hoist(changed("e", type="bf16[8, 16]"), CHAIN, FACTS)


@pytest.mark.parametrize("facts", [{"once": True}, {"draws": 16}])
def test_what_may_run_once_is_not_copied_to_forward(facts: dict[str, object]) -> None:
    trace = changed("h_t", **facts)
    with pytest.raises(ValueError, match="the chain depends on h_t, which may run once, and in backward"):
        hoisted(trace, CHAIN)
    assert not can_hoist(trace, CHAIN, FACTS)


def test_a_tangent_that_is_no_number_or_one_of_several_is_refused() -> None:
    with pytest.raises(ValueError, match="depends on 1 tangents; it can run in forward with one, of a scalar"):
        hoisted(changed("g", type="f32[1]"), CHAIN)
    second = parse("k = tangent()  # f32[] | makes k:4\nreturn").ops
    with pytest.raises(ValueError, match="depends on 2 tangents"):
        hoisted(Trace((*second, *changed("e", reads=("d", "k")).ops), HEAD.outputs), CHAIN)
    with pytest.raises(ValueError, match="depends on 0 tangents"):
        hoisted(changed("d", reads=("c", "c")), CHAIN)


def test_gradients_to_add_to_are_not_there_in_forward() -> None:
    sums = parse("s = gradient()  # f32[8, 16] | makes s:512\nreturn").ops
    trace = Trace((*sums, *changed("e", reads=("d", "s")).ops), HEAD.outputs)
    assert not can_hoist(trace, CHAIN, facts_of(trace))


@settings(max_examples=60, deadline=None)
@given(trace=row_steps(), data=st.data())
def test_what_is_hoisted_is_proportional_to_the_tangent(trace: Trace, data: st.DataObject) -> None:
    facts = facts_of(trace)
    seed = data.draw(st.sampled_from(wide_values(trace)))
    for cut in find_chains(trace, facts, seed, 2):
        if not can_hoist(trace, cut.rule, facts) or (early := hoisted(trace, cut.rule)) is None:
            continue
        shown = Trace(trace.ops, tuple(("value", name) for name in sorted(early.scales)))
        once, twice = run(shown, tangent=1.0), run(shown, tangent=2.0)
        assert all((2 * once[key] == twice[key]).all() for key in once)
