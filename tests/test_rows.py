"""The tables of `rows.md` are whole: every row of FairScale's behaviours has its tests, and they exist."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Table:
    """A file, the rows it has to have, and which of them are defects of FairScale."""

    file: str
    rows: tuple[str, ...]
    defects: str


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    name: str
    defect: bool
    here: str
    tests: tuple[str, ...]


TABLES = (
    Table(
        "seed/rows.md",
        (*(f"O{i:02}" for i in range(1, 59)), *(f"C{i:02}" for i in range(1, 40))),
        "O03 O08 O15 O26 O27 O28 O29 O30 O31 O32 O33 O34 O35 O36 O40 O43 O45 O46 O50 O55 O56 C09 C15 C16 C17 C19 C20 C21 C23 C25",
    ),
    Table(
        "memgraph/oss/rows.md",
        tuple(f"S{i:02}" for i in range(1, 75)),
        "S04 S16 S23 S36 S37 S38 S39 S40 S42 S45 S46 S51 S52 S53 S61 S62 S63 S66",
    ),
    Table(
        "memgraph/stages/rows.md",
        tuple(f"A{i:02}" for i in range(1, 78)),
        "A09 A10 A20 A21 A24 A25 A26 A27 A29 A43 A46 A48 A52 A57 A61 A63 A73",
    ),
)
each_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.file)


@cache
def rows(table: Table) -> tuple[Row, ...]:
    text = (HERE / table.file).read_text()
    lines = re.findall(r"^\| ([AOCS]\d\d)( D)? \| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return tuple(_row(name, bool(defect), here, shown) for name, defect, here, shown in lines)


def _row(name: str, defect: bool, here: str, shown: str) -> Row:
    return Row(name, defect, here, tuple(test for test in shown.split() if test != "-"))


@cache
def functions() -> tuple[ast.FunctionDef, ...]:
    """All functions of the test files."""
    files = [ast.parse(path.read_text()) for path in HERE.rglob("test_*.py")]
    return tuple(part for file in files for part in file.body if isinstance(part, ast.FunctionDef))


@cache
def known() -> frozenset[str]:
    """The tests that there are, by their functions."""
    return frozenset(function.name for function in functions())


def is_excused(function: ast.FunctionDef) -> bool:
    """Return True if the test may pass without showing anything, because it is an xfail or is skipped."""
    marks = {
        mark.attr for part in function.decorator_list for mark in ast.walk(part) if isinstance(mark, ast.Attribute)
    }
    calls = {ast.unparse(call.func) for call in ast.walk(function) if isinstance(call, ast.Call)}
    return bool(marks & {"xfail", "skip"} or calls & {"pytest.xfail", "pytest.skip"})


@each_table
def test_no_row_is_missing_and_none_is_said_twice(table: Table) -> None:
    assert tuple(row.name for row in rows(table)) == table.rows
    assert " ".join(row.name for row in rows(table) if row.defect) == table.defects


@each_table
def test_every_row_says_what_happens_here_and_a_defect_is_shown(table: Table) -> None:
    assert all(row.here for row in rows(table))
    assert [row.name for row in rows(table) if row.defect and not row.tests] == []


@pytest.mark.long
@each_table
def test_every_test_that_is_named_exists(table: Table) -> None:
    assert known() > {"test_every_test_that_is_named_exists"}
    assert [f"{row.name}: {test}" for row in rows(table) for test in row.tests if test not in known()] == []


@pytest.mark.long
@each_table
def test_no_row_is_shown_by_a_test_that_is_expected_to_fail_or_skipped(table: Table) -> None:
    excused = {function.name for function in functions() if is_excused(function)}
    assert [f"{row.name}: {test}" for row in rows(table) for test in row.tests if test in excused] == []


def test_what_excuses_a_test_is_seen() -> None:
    told = """
@pytest.mark.xfail(strict=True)
def test_a(): ...
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.skip)])
def test_b(): ...
def test_c(): pytest.skip("today")
@pytest.mark.skipif(not CUDA, reason="no GPU")
def test_d(): ...
"""
    found = [part.name for part in ast.parse(told).body if isinstance(part, ast.FunctionDef) and is_excused(part)]
    assert found == ["test_a", "test_b", "test_c"]
