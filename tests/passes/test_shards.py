"""Parameters in buckets, and who owns which elements of them."""

from __future__ import annotations

from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from passes.shards import Bucket, BucketSizes, ParamSpec, make_buckets, owned_nbytes

SIZES = BucketSizes(bucket_nbytes=64, single_nbytes=1000)


def lines(buckets: tuple[Bucket, ...]) -> str:
    return "\n".join(map(str, buckets))


def items(*counts: int, kind: int = 0, whole: bool = False, quantum: int = 1) -> list[ParamSpec]:
    return [ParamSpec(count, 4, kind, whole, quantum=quantum) for count in counts]


def test_each_rank_owns_the_same_part_of_a_bucket() -> None:
    assert_expected_inline(
        lines(make_buckets([*items(7, 1, 4), *items(3, kind=1)], 2, SIZES)),
        """\
bucket of shards of 6: 0[0:6] to 0 | 0[6:7] to 1 | 1[0:1] to 1 | 2[0:4] to 1
bucket of shards of 2: 3[0:2] to 0 | 3[2:3] to 1""",
    )


def test_a_long_stretch_is_a_bucket_alone_without_a_rest() -> None:
    assert_expected_inline(
        lines(make_buckets(items(41, 5), 2, BucketSizes(bucket_nbytes=64, single_nbytes=32))),
        """\
bucket of shards of 8: 0[0:8] to 0 | 0[8:16] to 1
bucket of shards of 8: 0[16:24] to 0 | 0[24:32] to 1
bucket of shards of 4: 0[32:36] to 0 | 0[36:40] to 1
bucket of shards of 3: 0[40:41] to 0 | 1[0:2] to 0 | 1[2:5] to 1""",
    )


def test_whole_items_go_to_who_has_least_the_largest_first() -> None:
    assert_expected_inline(
        lines(
            make_buckets(
                items(9, 7, 5, 3, 1, 1, 20, 2, whole=True), 2, BucketSizes(bucket_nbytes=100, single_nbytes=1000)
            )
        ),
        """\
bucket of 24: 3[0:3] to 0 | 4[0:1] to 0 | 6[0:20] to 0
bucket of 24: 0[0:9] to 1 | 1[0:7] to 1 | 2[0:5] to 1 | 5[0:1] to 1 | 7[0:2] to 1""",
    )


def test_what_comes_later_goes_to_who_has_least_by_then() -> None:
    first = items(10, 6, whole=True)
    laid = make_buckets(first, 2, SIZES)
    loads = owned_nbytes(laid, first, 2)
    assert loads == [40, 24]
    assert [bucket.owner for bucket in make_buckets(items(1, kind=1, whole=True), 2, SIZES, loads)] == [1]


def test_frozen_items_do_not_unbalance_the_others() -> None:
    frozen = [ParamSpec(1000, 4, 1, whole=True, frozen=True)]
    laid = make_buckets([*items(4, 4, whole=True), *frozen], 2, SIZES)
    assert sorted(owned_nbytes(laid, [*items(4, 4, whole=True), *frozen], 2)) == [16, 16]


def test_pieces_are_short_where_that_is_wanted() -> None:
    assert_expected_inline(
        lines(make_buckets(items(40), 2, BucketSizes(bucket_nbytes=1000, single_nbytes=1000, shard_nbytes=32))),
        """bucket of shards of 20: 0[0:7] to 0 | 0[7:14] to 0 | 0[14:20] to 0 | 0[20:27] to 1 | 0[27:34] to 1 | 0[34:40] to 1""",
    )
    (bucket,) = make_buckets(items(40), 2, BucketSizes(bucket_nbytes=1000, single_nbytes=1000, shard_nbytes=32))
    assert [str(piece) for piece in bucket.ranges(1)] == ["0[20:40] to 1"]


def test_an_item_without_elements_has_an_owner() -> None:
    assert lines(make_buckets(items(0), 2, SIZES)) == "bucket of shards of 0: 0[0:0] to 0"
    assert lines(make_buckets(items(0, whole=True), 2, SIZES)) == "bucket of 0: 0[0:0] to 0"


SHAPES = st.lists(
    st.builds(
        ParamSpec,
        st.integers(0, 300),
        st.sampled_from([2, 4, 8]),
        st.integers(0, 2),
        st.booleans(),
        st.booleans(),
        st.sampled_from([1, 8]),
    ),
    max_size=12,
)


@given(SHAPES, st.integers(1, 9), st.integers(8, 500), st.integers(8, 500), st.none() | st.integers(1, 200))
def test_every_element_has_one_owner_and_ranks_have_the_same(
    given_items: list[ParamSpec], ranks: int, bucket: int, alone: int, piece: int | None
) -> None:
    buckets = make_buckets(given_items, ranks, BucketSizes(bucket, alone, piece))
    owned: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(given_items))}
    for one in buckets:
        at = 0
        for part in one.shards:
            item = given_items[part.param]
            assert item.kind == one.kind and part.offset >= at
            assert part.end == item.count or part.end % item.quantum == 0
            assert piece is None or part.count * item.itemsize <= max(piece, item.quantum * item.itemsize) or item.whole
            at = part.offset + part.count
            owned[part.param].append((part.begin, part.end))
            if one.owner is None:
                assert part.rank * one.shard_size <= part.offset and at <= (part.rank + 1) * one.shard_size
            else:
                assert part.rank == one.owner and part.count == item.count
        assert one.owner is not None or at <= ranks * one.shard_size
        nbytes = sum(part.count * given_items[part.param].itemsize for part in one.shards)
        shortest = max(ranks * given_items[i].quantum * given_items[i].itemsize for i in one.params)
        assert one.owner is not None or nbytes <= max(bucket, shortest)
    for i, stretches in owned.items():
        ends = [0, *(end for _, end in sorted(stretches))]
        assert stretches and ends == [*(begin for begin, _ in sorted(stretches)), given_items[i].count]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(1, 9))
def test_ranks_own_the_same_but_for_one_element_a_bucket(counts: list[int], ranks: int) -> None:
    buckets = make_buckets(items(*counts), ranks, BucketSizes(500, 100))
    owned = [sum(piece.count for bucket in buckets for piece in bucket.owned_by(rank)) for rank in range(ranks)]
    assert max(owned) - sum(counts) / ranks <= len(buckets)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(1, 9))
def test_whole_items_are_shared_out_within_the_largest(counts: list[int], ranks: int) -> None:
    given_items = items(*counts, whole=True)
    loads = owned_nbytes(make_buckets(given_items, ranks, SIZES), given_items, ranks)
    assert max(loads) - min(loads) <= 4 * max(counts)
