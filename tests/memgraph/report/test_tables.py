"""Numbers of bytes are printed so that they can be given back."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from memgraph.report.tables import fitted, mb, mb_above, printed, table
from memgraph.system.byte_sizes import nbytes_within


@given(st.integers(1, 10**13))
@example(25_751_772)
@example(100_000)
def test_bytes_that_are_rounded_up_are_enough(nbytes: int) -> None:
    read = nbytes_within(mb_above(nbytes).replace(" ", ""), 1 << 62, "any device")
    assert nbytes <= read < nbytes + 100_000


def test_bytes_have_a_unit_in_which_they_are_short() -> None:
    assert [mb(n) for n in (0, 999, 8_192, 100_000, 25_751_772, 9_999_900_000, 23_914_900_000)] == [
        "0 B", "999 B", "8.2 kB", "0.1 MB", "25.8 MB", "9999.9 MB", "23.9 GB"
    ]  # fmt: skip
    assert mb(-8_192) == "-8.2 kB" and mb_above(8_192) == "8192 B"
    assert mb_above(25_751_772) == "25.8 MB" and mb_above(23_914_900_001) == "23915.0 MB"
    assert mb_above(25_700_001) == "25.8 MB"


@given(
    st.lists(
        st.lists(st.from_regex(r"[a-z.]{1,40}( [a-z.]{1,30}){0,3}", fullmatch=True), min_size=3, max_size=3), min_size=1
    ),
    st.integers(20, 160),
)
def test_no_word_of_a_table_is_broken_or_left_out(rows: list[list[str]], width: int) -> None:
    made = table("", "one", "two", "three")
    for row in rows:
        made.add_row(*row)
    text = printed(made)
    words = Counter(word for row in rows for cell in row for word in cell.split())
    assert words + Counter(["one", "two", "three"]) == Counter(text.split())
    _, taken = fitted(made, width)
    assert taken >= width
