"""Rows of parts: each row is in one part, parts are of nearly equal sizes, and each is a view."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from passes.slices.part_rows import PartRows, part_rows

few = st.integers(1, 40)


def ranges(rows: int, tokens: int, parts: int) -> list[tuple[int, int]]:
    return [(part.begin, part.end) for part in part_rows(rows, tokens, parts)]


def test_rows_are_divided_as_the_file_says() -> None:
    assert ranges(64, 0, 4) == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert ranges(40, 10, 2) == [(0, 20), (20, 40)]
    assert ranges(40, 10, 8) == [(0, 5), (5, 10), (10, 15), (15, 20), (20, 25), (25, 30), (30, 35), (35, 40)]


def test_parts_may_be_uneven_and_no_part_is_empty() -> None:
    assert ranges(7, 0, 3) == [(0, 2), (2, 4), (4, 7)]
    assert ranges(2, 0, 5) == [(0, 1), (1, 2)]
    assert ranges(6, 3, 4) == [(0, 1), (1, 3), (3, 4), (4, 6)]


@given(sequences=few, tokens=few, parts=few, divided=st.booleans())
def test_each_row_is_in_one_part(sequences: int, tokens: int, parts: int, divided: bool) -> None:
    rows = sequences * tokens
    found = part_rows(rows, tokens if divided else 0, parts)
    assert [row for part in found for row in range(part.begin, part.end)] == list(range(rows))
    sizes = {part.count for part in found}
    assert min(sizes) > 0 and max(sizes) - min(sizes) <= (tokens if divided and parts <= sequences else 1)
    if not divided:
        assert len(found) == min(parts, rows)
    elif parts <= rows:
        assert min(parts, sequences) <= len(found) < parts + sequences


@given(sequences=few, tokens=few, parts=few, each=st.integers(1, 3))
def test_the_views_of_a_part_lead_to_its_rows(sequences: int, tokens: int, parts: int, each: int) -> None:
    rows = sequences * tokens
    of_two = np.arange(rows).reshape(1, sequences, tokens, 1)
    of_one = np.arange(rows * each).reshape(1, rows * each)
    for part in part_rows(rows, tokens, parts):
        assert viewed(part, of_two, (1, 3)).ravel().tolist() == list(range(part.begin, part.end))
        assert viewed(part, of_one, (1, 2)).ravel().tolist() == list(range(part.begin * each, part.end * each))


def viewed(part: PartRows, array: np.ndarray, dims: tuple[int, int]) -> np.ndarray:
    """Return the rows of a part; its shape is what the part says."""
    found = array
    for dim, begin, end in part.views(array.shape, dims):
        assert 0 <= begin < end <= array.shape[dim]
        found = found[(slice(None),) * dim + (slice(begin, end),)]
    assert found.shape == part.shape(array.shape, dims)
    return found


def test_a_part_that_is_all_rows_needs_no_view() -> None:
    (part,) = part_rows(8, 0, 1)
    assert list(part.views((8, 4), (0, 1))) == [] and part.shape((8, 4), (0, 1)) == (8, 4)
