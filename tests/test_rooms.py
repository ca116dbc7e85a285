"""ARCHITECTURE.md names every file, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_file_is_named_in_its_table() -> None:
    found = {folder: modules(folder) for folder in ("passes", "memgraph", "memgraph/oss", "memgraph/kernels")}
    told = tables((ROOT / "ARCHITECTURE.md").read_text())
    rooms = found["memgraph"] | found["memgraph/oss"] | found["memgraph/kernels"]
    assert found["passes"] - told["passes"] == set()
    assert rooms - told["memgraph"] == set()


def test_every_name_in_a_table_is_a_file() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for folder, rows in (("passes", rows_of(text, "passes")), ("memgraph", rows_of(text, "memgraph"))):
        for row in rows:
            first = row.split("|")[1]
            there = modules(f"{folder}/oss" if "`oss/`" in first else folder)
            if "`kernels/`" not in first:
                assert set(re.findall(r"`(\w+)`", first)) - there == set(), row


def modules(folder: str) -> set[str]:
    return {file.stem for file in (ROOT / folder).glob("*.py")} - {"__init__"}


def tables(text: str) -> dict[str, set[str]]:
    return {folder: set(re.findall(r"`(\w+)`", "\n".join(rows_of(text, folder)))) for folder in ("passes", "memgraph")}


def rows_of(text: str, folder: str) -> list[str]:
    """The rows of a folder's table."""
    table = text[text.index(f"| `{folder}/` | |") :].split("\n\n")[0]
    return table.splitlines()[2:]
