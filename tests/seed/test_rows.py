"""The table of `rows.md` is whole: every row of FairScale's behaviours has its tests, and they exist."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROWS = [*(f"O{i:02}" for i in range(1, 59)), *(f"C{i:02}" for i in range(1, 40))]
DEFECTS = "O03 O08 O15 O26 O27 O28 O29 O30 O31 O32 O33 O34 O35 O36 O40 O43 O45 O46 O50 O55 O56 C09 C15 C16 C17 C19 C20 C21 C23 C25"


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    defect: bool
    here: str
    tests: tuple[str, ...]


@cache
def rows() -> tuple[Row, ...]:
    lines = re.findall(r"^\| ([OC]\d\d)( D)? \| (.+?) \| (.+) \|$", (HERE / "rows.md").read_text(), re.MULTILINE)
    return tuple(_row(name, bool(defect), here, shown) for name, defect, here, shown in lines)


def _row(name: str, defect: bool, here: str, shown: str) -> Row:
    return Row(name, defect, here, tuple(test for test in shown.split() if test != "-"))


@cache
def known() -> frozenset[str]:
    """The tests that the files beside define, by their functions."""
    files = [ast.parse(path.read_text()) for path in HERE.parent.rglob("test_*.py")]
    return frozenset(part.name for file in files for part in file.body if isinstance(part, ast.FunctionDef))


def test_no_row_is_missing_and_none_is_said_twice() -> None:
    assert [row.name for row in rows()] == ROWS
    assert " ".join(row.name for row in rows() if row.defect) == DEFECTS


def test_every_row_says_what_happens_here_and_a_defect_is_shown() -> None:
    assert all(row.here for row in rows())
    assert [row.name for row in rows() if row.defect and not row.tests] == []


def test_every_test_that_is_named_exists() -> None:
    assert known() > {"test_every_test_that_is_named_exists"}
    assert [f"{row.name}: {test}" for row in rows() for test in row.tests if test not in known()] == []
