"""The table of optimizers whose states are on disk: how a row is made, and that the page has the results."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.optimizers import DEFAULT, OPTIMIZERS, PAGE, Row, Trained, kept, row_of
from tests.support.allocator_meter import compiler, preloaded


def test_the_page_has_the_results() -> None:
    rows, lines = kept(DEFAULT), PAGE.read_text().splitlines()
    assert [row.optimizer for row in rows] == list(OPTIMIZERS)
    for row in rows:
        assert row.line in lines


def test_all_that_was_trained_is_eagers_and_within_its_budget() -> None:
    cells = [row.cell(per) for row in kept(DEFAULT) for per in row.budgets]
    assert not [cell for cell in cells if "UNEQUAL" in cell or "OVER" in cell]
    assert sum(cell.startswith("equal") for cell in cells) >= 50


def test_a_result_that_differs_or_is_over_its_budget_is_said() -> None:
    found = Trained("", measured=110, forecast=100)
    row = Row("SGD", 100, "element", 0.0, {"1": found, "2": found}, {"1": False, "2": True})
    assert row.cell("1") == "UNEQUAL, 1.10, OVER"
    assert row.cell("2") == "equal, 1.10, OVER"
    row.budgets["1"] = Trained("", why="no plan", smallest=150)
    assert row.cell("1") == "none: from 1.50"


@pytest.mark.long
@pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="the second meter is a library of C that stands before glibc"
)
def test_a_row_is_made_of_processes(tmp_path: Path) -> None:
    row = row_of("AdamW", [8.0], (4, 6, 256), preloaded(tmp_path))
    assert row.cell("8").startswith("equal") and "OVER" not in row.cell("8")
    assert {field.name for field in fields(Row)} == set(vars(row))
