"""A cost that was damaged in a sound file is measured anew, and said once."""

from __future__ import annotations

import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

import pytest

from memgraph.costs import Costs


def test_damaged_costs_are_forgotten_said_once_and_kept_anew(tmp_path: Path) -> None:
    costs = Costs(tmp_path / "costs.sqlite")
    for key in ("one", "other"):
        costs.put(key, 1.5)
    with closing(sqlite3.connect(costs.path)) as file, file:
        file.execute("UPDATE costs SET value = '9.5'")
    with pytest.warns(RuntimeWarning, match="costs in it that were damaged .* measured anew") as said:
        assert [costs.get(key) for key in ("one", "other")] == [None, None]
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        costs.put("one", 2.5)
        assert Costs(costs.path).get("one") == 2.5
