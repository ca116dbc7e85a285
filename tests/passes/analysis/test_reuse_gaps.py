"""Decisions are about forward's values between their last use in forward and their first in backward."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from hypothesis import given

from passes import Trace, parse
from passes.analysis.reuse_gaps import ReuseGaps
from passes.ir.trace import ITEMSIZE, type_nbytes
from tests.support.strategies import traces

STEP = parse("""
    forward:
    w = parameter()  # f32[4, 4] | makes w:64
    x = input()  # f32[8, 4] | makes x:128
    d = tangent()  # f32[8, 4] | makes d:128
    a = mm(x, w)  # f32[8, 4] | makes a:128 | 10.0 us
    v = view(a)  # f32[32] | holds a
    n = norm(v)  # f32[32], f32[1] | makes n.0:128, n.1:4 | 5.0 us
    y = getitem(n)  # f32[32] | holds n.0
    r = getitem(n)  # f32[1] | holds n.1
    t = view(w)  # f32[4, 4] | holds w
    c = mm(y, t)  # f32[2] | makes c:128 | 10.0 us
    z = empty()  # f32[0] | makes z:0
    o = mm(c, z)  # f32[8, 4] | makes o:128 | 10.0 us
    backward:
    e = norm_backward(d, y, r, y)  # f32[32] | makes e:128 | 7.0 us
    f = mm(e, v)  # f32[4, 4] | makes f:64 | 10.0 us
    g = mm(e, o)  # f32[4, 4] | makes g:64 | 10.0 us
    h = mul(f, a)  # f32[4, 4] | makes h:64 | 10.0 us
    return output o, gradient g, gradient h
""")
GAPS = ReuseGaps(STEP)


def names(found: dict[str, int]) -> dict[str, str]:
    return {storage: STEP.ops[i].name for storage, i in found.items()}


def test_the_storages_that_forward_makes_and_keeps_to_itself_can_be_decided_about() -> None:
    assert GAPS.producer == {"a": "a", "n.0": "n", "n.1": "n", "c": "c"}


def test_a_value_is_known_by_the_movable_storages_that_it_holds() -> None:
    assert GAPS.holds == {"a": ("a",), "v": ("a",), "n": ("n.0", "n.1"), "y": ("n.0",), "r": ("n.1",), "c": ("c",)}
    assert GAPS.values == {"a": ("a", "v"), "n.0": ("n", "y"), "n.1": ("n", "r"), "c": ("c",)}


def test_a_gap_is_from_the_last_use_in_forward_to_the_uses_in_backward() -> None:
    assert names(GAPS.last_forward_use) == {"a": "n", "n.0": "c", "n.1": "r", "c": "o"}
    uses = {storage: [STEP.ops[i].name for i in found] for storage, found in GAPS.uses.items()}
    assert uses == {"n.0": ["e"], "n.1": ["e"], "a": ["f", "h"]}


def test_backward_is_known_by_the_movable_values_that_it_reads() -> None:
    assert {STEP.ops[i].name: values for i, values in GAPS.reads.items()} == {"e": ("y", "r"), "f": ("v",), "h": ("a",)}


def test_the_first_value_that_is_all_of_a_storage_can_be_offloaded() -> None:
    assert GAPS.whole_value == {"a": "a", "n.0": "y", "n.1": "r"}  # c shows two of its 32 numbers


def test_parts_are_what_takes_one_storage_of_several_out() -> None:
    assert GAPS.getitems == {"n": ("y", "r")}


def test_ops_begin_one_behind_the_other() -> None:
    assert_expected_inline(
        " ".join(f"{us:g}" for us in GAPS.begins), """0 0 0 0 10 10 15 15 15 15 25 25 35 42 52 62 72"""
    )


@pytest.mark.parametrize(
    ("type", "nbytes"),
    [
        ("f32[8, 4]", 128), ("f32[]", 4), ("bf16[3]", 6), ("b8[2, 0, 5]", 0), ("u8[123]", 123), ("c128[1]", 16), ("i64[7,]", 56),
        ("f32[2], f32[2]", -1), ("f32[2], f32[]", -1), ("", -1), ("f32", -1), ("q4[8]", -1), ("f32[8", -1), ("None", -1),
    ],
)  # fmt: skip
def test_a_type_says_its_bytes_if_it_is_one_tensor(type: str, nbytes: int) -> None:
    assert type_nbytes(type) == nbytes


def test_every_dtype_says_its_size_in_its_name() -> None:
    assert {dtype: int(dtype.lstrip("bcfiu")) / 8 for dtype in ITEMSIZE} == ITEMSIZE


@given(traces())
def test_no_op_reads_a_storage_inside_its_gap(trace: Trace) -> None:
    gaps = ReuseGaps(trace)
    for storage in gaps.producer:
        readers = [i for i, op in enumerate(trace.ops) if any(storage in trace.op[name].holds for name in op.reads)]
        forward = [gaps.trace.index[gaps.producer[storage]], *(i for i in readers if i < trace.boundary)]
        assert gaps.last_forward_use[storage] == max(forward)
        assert gaps.uses.get(storage, ()) == tuple(i for i in readers if i >= trace.boundary)


@given(traces())
def test_a_value_that_can_be_offloaded_is_one_whole_storage(trace: Trace) -> None:
    gaps = ReuseGaps(trace)
    for storage, value in gaps.whole_value.items():
        assert trace.op[value].holds == (storage,)
        assert trace.nbytes[storage] == type_nbytes(trace.op[value].type) > 0
