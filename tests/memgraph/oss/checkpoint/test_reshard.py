"""Pieces and rows are of the same elements; an outline says all that is not in the tensors."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memgraph import StateError
from memgraph.oss.checkpoint.sharded_state import Overlap, overlaps, rows_of
from memgraph.oss.checkpoint.state_outline import Kind, fill_outline, kinds, outline, tensors
from passes.shards import BucketSizes, ParamSpec, ShardRange, make_buckets
from tests.memgraph.oss.checkpoint.test_full_state import same

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@given(SHAPES, st.integers(1, 5), st.booleans(), st.integers(1, 40))
def test_every_element_of_a_shard_is_in_the_rows_of_one_rank(
    shape: list[int], ranks: int, turned: bool, piece: int
) -> None:
    like = torch.empty(shape[::-1] if turned else shape)
    like = like.permute(*reversed(range(len(shape)))) if turned else like
    kind = Kind(torch.float32, tuple(like.shape), like.stride())
    pieces = [
        each
        for bucket in make_buckets([ParamSpec(like.numel(), 4, 0)], ranks, BucketSizes(64, 16, piece * 4))
        for each in bucket.shards
    ]
    found = sorted(overlaps(pieces, rows_of(kind, ranks)), key=lambda overlap: overlap.begin)
    assert [one.end for one in found[:-1]] == [other.begin for other in found[1:]]
    assert (found[0].begin, found[-1].end) == (0, like.numel())


@given(SHAPES, st.integers(1, 5))
def test_rows_are_those_that_torch_cuts(shape: list[int], ranks: int) -> None:
    like = torch.arange(math.prod(shape)).view(shape)
    kind = Kind(like.dtype, tuple(shape), like.stride())
    rows = rows_of(kind, ranks)
    cut = list(like.chunk(ranks, rows.dim))
    for rank in range(ranks):
        room = rows.local(rank, kind, torch.device("cpu"))
        wanted = cut[rank] if rank < len(cut) else like.narrow(rows.dim, 0, 0)
        assert room.shape == wanted.shape
        if wanted.numel():
            assert wanted.flatten()[0] == rows.bounds[rank]


def test_what_goes_where() -> None:
    rows = rows_of(Kind(torch.float32, (4, 2), (2, 1)), 2)
    first, second = ShardRange(0, 0, 6, 0, 0), ShardRange(0, 6, 8, 1, 6)
    assert list(overlaps([first, second], rows)) == [
        Overlap(first, 0, 0, 4),
        Overlap(first, 1, 4, 6),
        Overlap(second, 1, 6, 8),
    ]


NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
TENSORS = st.sampled_from(
    [torch.zeros(2, 3).t(), torch.ones((), dtype=torch.bfloat16), torch.zeros(0), torch.arange(3)]
)
VALUES = st.recursive(
    NUMBERS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=40)
@given(VALUES)
def test_an_outline_and_the_tensors_are_the_value(value: object) -> None:
    there = json.loads(json.dumps(outline(value, "w")))
    sent = list(tensors(value))
    assert same_or_nan(fill_outline(there, iter(sent)), value)
    assert [(kind.dtype, kind.shape, kind.strides) for kind in kinds(there)] == [
        (each.dtype, each.shape, each.stride()) for each in sent
    ]


def same_or_nan(one: object, other: object) -> bool:
    return same(one, other) or repr(one) == repr(other)


def test_what_cannot_be_written_down_is_refused_by_name() -> None:
    with pytest.raises(StateError, match="the state of parameter 3 has a set in it"):
        outline({"seen": [{1}]}, "parameter 3")


def test_a_tensor_with_gaps_is_sent_without_them() -> None:
    (kind,) = kinds(outline(torch.zeros(4, 6)[:, ::2], "w"))
    assert kind.empty().is_contiguous()
    assert isinstance(kind.empty(), Tensor)
