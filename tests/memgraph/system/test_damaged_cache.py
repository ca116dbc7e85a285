"""A cost that was damaged in a sound file is measured again with one warning."""

from __future__ import annotations

import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

import pytest

from memgraph.system.measurement_cache import CostDatabase


@pytest.mark.parametrize("damage", [0xFF, 0x80, 0x00])
def test_one_letter_that_is_none_stops_nothing(tmp_path: Path, damage: int) -> None:
    costs = CostDatabase(tmp_path / "costs.sqlite")
    for key in ("one", "other"):
        costs.put(key, [1.5, "words"])
    whole = costs.path.read_bytes()
    at = whole.index(b"words")
    costs.path.write_bytes(whole[:at] + bytes([damage]) + whole[at + 1 :])
    with pytest.warns(RuntimeWarning, match="has damaged costs, which are measured again"):
        assert [costs.get(key) for key in ("one", "other")].count([1.5, "words"]) == 1
    costs.put("one", 2.5)
    costs.put("other", 2.5)
    assert [costs.get(key) for key in ("one", "other")] == [2.5, 2.5]


def test_a_byte_that_is_damaged_anywhere_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    for i in range(20):
        CostDatabase(path).put(f"op {i}", [i, "words"])
    whole = path.read_bytes()
    for at in range(0, len(whole), 53):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        costs = CostDatabase(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i in range(0, 20, 7):
                assert costs.get(f"op {i}") in ([i, "words"], None)
            costs.put("op 1", 1)


def test_damaged_costs_are_dropped_with_one_warning_and_measured_again(tmp_path: Path) -> None:
    costs = CostDatabase(tmp_path / "costs.sqlite")
    for key in ("one", "other"):
        costs.put(key, 1.5)
    with closing(sqlite3.connect(costs.path)) as file, file:
        file.execute("UPDATE costs SET value = '9.5'")
    with pytest.warns(RuntimeWarning, match="has damaged costs, which are measured again") as said:
        assert [costs.get(key) for key in ("one", "other")] == [None, None]
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        costs.put("one", 2.5)
        assert CostDatabase(costs.path).get("one") == 2.5
