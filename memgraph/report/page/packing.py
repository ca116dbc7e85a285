"""Pack columns of integers as short JSON, and strings into one table.

[7, 7, 7, 9]    ->   ["r", [7, 3, 9, 1]]            runs: value, count, ...
[0, 5, 10, 20]  ->   ["sr", [0, 1, 5, 2, 10, 1]]    runs of the differences; "s" says that they are summed
[512, 8, 512]   ->   ["t", [512, 8], [0, 1, 0]]     places in a table of the distinct values
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any

Column = list[Any]


def packed(values: Iterable[int]) -> Column:
    """Return the shortest of the forms in which the page reads a column."""
    column = [int(value) for value in values]
    steps = [later - earlier for earlier, later in pairwise([0, *column])]
    forms = [form for mark, ints in (("", column), ("s", steps)) for form in _forms(mark, ints)]
    return min(forms, key=lambda form: len(json.dumps(form, separators=(",", ":"))))


class Strings:
    """A table of strings, in which each stands once.  The first is empty."""

    def __init__(self) -> None:
        self.place: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        """Return the place of a string in the table."""
        return self.place.setdefault(text, len(self.place))

    def column(self, texts: Iterable[str]) -> Column:
        """Return the places of strings as a column."""
        return packed(map(self.add, texts))

    @property
    def table(self) -> list[str]:
        return list(self.place)


def _forms(mark: str, ints: Sequence[int]) -> list[Column]:
    """Return integers as they are, as runs, and as places in a table; `mark` says what they are."""
    runs = [number for value, run in groupby(ints) for number in (value, sum(1 for _ in run))]
    forms: list[Column] = [[mark, list(ints)], [f"{mark}r", runs]]
    distinct = [value for value, _ in Counter(ints).most_common()]  # the most frequent gets the shortest place
    if len(distinct) * 2 < len(ints):
        place = {value: i for i, value in enumerate(distinct)}
        forms.append([f"{mark}t", distinct, [place[value] for value in ints]])
    return forms
