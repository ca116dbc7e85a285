"""Slices that are chosen: those that lower the peak of a step that does not fit, each carried out in the next one's step."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import Machine, Op, Storage, Trace, check, predict
from passes.slices import choose
from passes.slices.chain import find_chains
from passes.slices.choose import choose_slices, slice_around
from passes.slices.parts import Origin
from passes.slices.row_rule import RowFacts
from passes.slices.unroll import unroll
from tests.support.row_traces import HEAD, facts_of, row_steps, run, same, wide_values


def larger(trace: Trace, rows: int) -> Trace:
    """Return a step with so many rows instead of 8, and bytes for them."""
    times = rows // 8

    def of(op: Op) -> Op:
        has_rows = "[8, " in op.type or ", 8]" in op.type
        type = op.type.replace("[8, ", f"[{rows}, ").replace(", 8]", f", {rows}]")
        made = tuple(Storage(made.name, made.nbytes * (times if has_rows else 1)) for made in op.makes)
        return replace(op, type=type, makes=made)

    return Trace(tuple(map(of, trace.ops)), trace.outputs)


def heads(count: int) -> Trace:
    """Return a step with several heads and losses, which have inputs and a tangent in common."""
    return repeated(HEAD, count)


def repeated(trace: Trace, count: int) -> Trace:
    """Return a step with the ops of another several times, which have its inputs in common."""
    shared = {op.name for op in trace.ops if op.is_input}

    def renamed(op: Op, i: int) -> Op:
        def name(value: str) -> str:
            return value if value in shared else f"{value}{i}"

        made = tuple(Storage(name(made.name), made.nbytes) for made in op.makes)
        holds = tuple(map(name, op.holds))
        return replace(op, name=name(op.name), reads=tuple(map(name, op.reads)), makes=made, holds=holds)

    ops = [op for op in trace.ops if op.name in shared]
    for phase in ("forward", "backward"):
        for i in range(count):
            ops += [renamed(op, i) for op in trace.ops if op.phase == phase and op.name not in shared]
    outputs = tuple((kind, f"{value}{i}") for i in range(count) for kind, value in trace.outputs)
    step = Trace(tuple(ops), outputs)
    check(step)
    return step


def peak(trace: Trace) -> int:
    return predict(trace, Machine(0)).peak


def test_a_step_that_fits_is_left_as_it_is() -> None:
    trace = larger(HEAD, 512)
    found = choose_slices(trace, Machine(peak(trace)), facts_of(trace))
    assert found.trace is trace and found.slices == ()


def test_the_chain_of_head_and_loss_runs_in_as_many_parts_as_lower_the_peak() -> None:
    trace = larger(HEAD, 512)
    found = choose_slices(trace, Machine(peak(trace) - 1), facts_of(trace))
    assert [(cut.rows, cut.parts) for cut in found.slices] == [(512, 8)]  # of 64 rows
    assert {"a", "b", "c", "l", "d", "e"} <= found.slices[0].rule.keys()
    assert peak(found.trace) < 0.4 * peak(trace)


def test_small_parts_are_not_worth_their_time() -> None:
    trace = larger(HEAD, 64)
    (cut,) = choose_slices(trace, Machine(0), facts_of(trace)).slices
    assert cut.parts == 2  # a chain of few rows may run in two parts, and in no more


def test_a_step_without_rules_is_left_as_it_is() -> None:
    trace = larger(HEAD, 512)
    assert choose_slices(trace, Machine(0), lambda name: RowFacts()).slices == ()


def test_one_slice_is_enough_where_the_step_then_fits() -> None:
    alike = larger(heads(2), 512)
    ops = tuple(replace(op, fn="relu") if op.name == "b1" else op for op in alike.ops)
    trace = replace(alike, ops=ops)  # the loss of the second head is another
    first = choose_slices(trace, Machine(peak(trace) - 1), facts_of(trace))
    both = choose_slices(trace, Machine(0), facts_of(trace))
    assert (len(first.slices), len(both.slices)) == (1, 2) and peak(both.trace) < peak(first.trace) < peak(trace)


def test_layers_that_are_alike_are_cut_alike() -> None:
    trace = larger(heads(3), 512)
    found = choose_slices(trace, Machine(peak(trace) - 1), facts_of(trace))
    assert {cut.parts for cut in found.slices} == {found.slices[0].parts}
    assert sorted(name for cut in found.slices for name in cut.rule if name[0] == "a") == ["a0", "a1", "a2"]


@pytest.mark.parametrize("count", [2, 3])
def test_each_of_several_heads_runs_in_parts(count: int) -> None:
    trace = larger(heads(count), 512)
    found = choose_slices(trace, Machine(0), facts_of(trace))
    assert all(any(f"a{i}" in cut.rule for cut in found.slices) for i in range(count))
    whole = [op.name for op in found.trace.ops if op.type == "f32[512, 16]"]
    assert whole == []


def test_what_a_slice_has_rewritten_has_no_rows_for_the_next() -> None:
    """The facts are of the ops that the step had; room of the same name reads nothing."""
    trace = larger(heads(2), 512)
    asked = facts_of(trace)
    with mock.patch.object(choose, "find_chains", wraps=find_chains) as found:
        choose_slices(trace, Machine(0), asked)
    for call in found.call_args_list:
        sliced, facts = call.args[:2]
        for op in sliced.ops:
            assert all(len(rule.reads) == len(op.reads) for rule in facts(op.name).rules)
            assert facts(op.name) == RowFacts() or op.fn == trace.op[op.name].fn


@settings(max_examples=40, deadline=None)
@given(trace=row_steps(), count=st.integers(1, 3), share=st.sampled_from((0.0, 0.5, 0.9)), reruns=st.booleans())
def test_no_slice_that_is_chosen_raises_the_peak(trace: Trace, count: int, share: float, reruns: bool) -> None:
    trace = repeated(trace, count)
    found = choose_slices(trace, Machine(int(share * peak(trace))), facts_of(trace), reruns=reruns)
    check(found.trace)
    assert (peak(found.trace) < peak(trace)) == bool(found.slices)
    known, origins = trace, dict[str, Origin]()
    for cut in found.slices:
        unrolled = unroll(known, cut)
        assert peak(unrolled.trace) <= peak(known)
        known, origins = unrolled.trace, origins | unrolled.origins
    assert known == found.trace and same(run(known, origins), run(trace))


@settings(max_examples=60, deadline=None)
@given(trace=row_steps(), parts=st.sampled_from((2, 3, 8)), data=st.data())
def test_the_chain_around_a_value_is_the_one_of_the_lowest_peak(trace: Trace, parts: int, data: st.DataObject) -> None:
    """It is what was asked for, so it is cut in any case."""
    seed = data.draw(st.sampled_from(wide_values(trace)))
    cut = slice_around(trace, Machine(0), facts_of(trace), seed, parts)
    peaks = [peak(unroll(trace, chain).trace) for chain in find_chains(trace, facts_of(trace), seed, parts)]
    assert (cut is None) == (peaks == []) and (cut is None or peak(unroll(trace, cut).trace) == min(peaks))
