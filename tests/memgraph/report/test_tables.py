"""Numbers of bytes are printed so that they can be given back."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from memgraph.report.tables import mb, mb_above
from memgraph.system.byte_sizes import nbytes_within


@given(st.integers(1, 10**13))
@example(25_751_772)
@example(100_000)
def test_bytes_that_are_rounded_up_are_enough(nbytes: int) -> None:
    read = nbytes_within(mb_above(nbytes).replace(" ", ""), 1 << 62, "any device")
    assert nbytes <= read < nbytes + 100_000


def test_few_bytes_are_printed_as_they_are() -> None:
    assert (mb(99_999), mb(25_751_772), mb_above(25_751_772)) == ("99999 B", "25.8 MB", "25.8 MB")
    assert mb_above(25_700_001) == "25.8 MB"
