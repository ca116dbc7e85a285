"""A slice prints and parses back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.slices.part_rows import part_rows
from passes.slices.slice import Slice, parse_slice
from tests.passes.slices.test_row_rule import rules

names = st.from_regex(r"[a-z_][a-z_0-9]{0,12}", fullmatch=True)
counts = st.integers(1, 10**6)
slices = st.builds(
    Slice,
    counts,
    st.just(0) | counts,
    counts,
    st.lists(st.tuples(names, rules), min_size=1, max_size=5).map(tuple),
    st.just(0) | counts,
)


@given(cut=slices)
def test_a_slice_prints_and_parses_back(cut: Slice) -> None:
    assert parse_slice(str(cut)) == cut


def test_sequences_are_printed_where_rows_are_of_some() -> None:
    cut = parse_slice("slice 12 rows of 6 in 2 parts: mm[0:1<0:1,-] view_5[0:2<0:1]")
    assert (cut.rows, cut.tokens, cut.parts, list(cut.rule)) == (12, 6, 2, ["mm", "view_5"])
    assert cut.part_rows == part_rows(12, 6, 2)
    assert str(Slice(12, 0, 2, cut.rules[:1])) == "slice 12 rows in 2 parts: mm[0:1<0:1,-]"


@pytest.mark.parametrize(
    "line",
    [
        "", "slice", "slice 12 rows in 2 parts: ", "slice 12 rows in 2 parts: mm", "slice x rows in 2 parts: mm[0:1<-]",
        "slice 12 rows of 0 in 2 parts: mm[0:1<-]", "slice 12 rows in 2 parts: mm[0:1<-]  relu[0:1<-]",
        "offload mm", "slice 12 rows in 2 parts, values from 0 bytes again: mm[0:1<-]",
        "slice 12 rows in 2 parts: mm[0:1<-] more", "slice 012 rows in 2 parts: mm[0:1<-]",
    ],
)  # fmt: skip
def test_what_is_no_slice_is_refused_with_one_that_is(line: str) -> None:
    with pytest.raises(ValueError, match=r"write e\.g\.: "):
        parse_slice(line)
