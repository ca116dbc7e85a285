"""Whatever state of Python forward reads takes effect when it changes, or is refused by name; and the docs say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.memgraph.guards.ways.table import HEAD, row
from tests.memgraph.guards.ways.way import WAYS, Way, outcome

PAGE = Path(__file__).parents[3] / "docs" / "python-state.md"
ALL = [(group, name, way) for group, ways in WAYS.items() for name, way in ways.items()]


@pytest.mark.parametrize(("group", "name", "way"), ALL, ids=[f"{group}: {name}" for group, name, _ in ALL])
def test_what_forward_reads_is_right_or_refused_and_the_page_says_which(group: str, name: str, way: Way) -> None:
    end = outcome(way)
    assert not end.startswith("WRONG")
    assert row(group, name, end) in PAGE.read_text().splitlines()


def test_the_page_has_all_ways_and_no_others() -> None:
    table = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0]
    assert len(table.splitlines()) == len(ALL) >= 120


@pytest.mark.long
@pytest.mark.parametrize(("group", "name", "way"), ALL, ids=[f"{group}: {name}" for group, name, _ in ALL])
def test_and_so_it_is_if_a_later_capture_is_the_first_to_read_it(group: str, name: str, way: Way) -> None:
    assert not outcome(way, is_late=True).startswith("WRONG")
