"""Blocks of rows: which weights are cut, how many rows a block has, and that blocks are all rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from passes.slices.row_blocks import LEVELS, UNITS, block_nbytes, block_sizes, rows_of_blocks

MB = 1 << 20
WEIGHTS = {"head": 80 * MB, "qkv": 48 * MB, "mlp": 16 * MB, "out": 4 * MB, "place": MB}


def test_level_0_cuts_nothing() -> None:
    assert block_nbytes(WEIGHTS, 0) == {}


def test_level_1_cuts_what_has_a_fourth_of_the_largest_into_eighths() -> None:
    assert block_nbytes(WEIGHTS, 1) == {"head": 10 * MB, "qkv": 10 * MB}


def test_level_2_cuts_more_and_finer() -> None:
    assert block_nbytes(WEIGHTS, 2) == dict.fromkeys(("head", "qkv", "mlp"), 10 * MB // 4)


def test_nothing_smaller_than_what_stays_whole_is_cut() -> None:
    assert block_nbytes(WEIGHTS, 2, whole=48 * MB) == {"head": 10 * MB // 4}
    assert block_nbytes(WEIGHTS, 2, whole=100 * MB) == {}


def test_there_may_be_no_weights() -> None:
    assert all(block_nbytes({}, level) == {} for level in range(LEVELS + 1))


def test_sizes_are_one_and_many_of_each_unit_within_the_bytes() -> None:
    assert block_sizes(10_000, 8192, 10 * MB, 4096) == [1152, 768, 384, 192]  # no 1,536 fit
    assert block_sizes(10_000, 8192, 40 * MB, 4096) == [4992, 4608, 1536, 768, 384, 192]


def test_no_block_is_all_of_a_weight() -> None:
    assert block_sizes(384, 4096, MB * 100, 4096) == [192]
    assert block_sizes(192, 4096, MB * 100, 4096) == []


def test_blocks_fill_whole_pages() -> None:
    assert block_sizes(10_000, 20, 100_000, 4096) == [3072]  # 1,024 rows are 5 pages
    assert block_sizes(5_000, 6, 30_000, 4096) == []  # 6,144 rows are the fewest that end at a page


def test_where_no_block_is_within_the_bytes_it_has_the_fewest_rows() -> None:
    assert block_sizes(10_000, 6, 30_000, 4096) == [6144]
    assert block_sizes(4096, 1024, 128 << 10, 4096) == [192]


@given(st.integers(2, 100_000), st.integers(1, 1 << 16), st.integers(1, 1 << 30), st.sampled_from([512, 4096]))
def test_every_size_is_within_its_bytes_or_the_smallest_and_ends_at_a_page(
    rows: int, row: int, most: int, page: int
) -> None:
    sizes = block_sizes(rows, row, most, page)
    for size in sizes:
        assert 0 < size < rows and size * row % page == 0 and size % min(UNITS) == 0
        assert size * row <= most or sizes == block_sizes(rows, row, 1, page)


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_blocks_are_all_rows_in_order(rows: int, size: int) -> None:
    blocks = rows_of_blocks(rows, size)
    assert [row for first, last in blocks for row in range(first, last)] == list(range(rows))
    assert {last - first for first, last in blocks[:-1]} <= {size}
