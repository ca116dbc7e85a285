"""ARCHITECTURE.md has a line for every file of every room, and for no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_file_has_a_line_in_its_room_and_no_other_has() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("## The rooms")[2]
    _, *sections = re.split(r"^### `(.+)/`$", text, flags=re.MULTILINE)
    told = {
        folder: sorted(re.findall(r"^\| `(\w+)` \|", lines, re.MULTILINE))
        for folder, lines in zip(sections[::2], sections[1::2], strict=True)
    }
    assert told == {folder: files(folder) for folder in told}
    assert {"passes", "memgraph", "memgraph/oss", "memgraph/kernels"} == set(told)


def files(folder: str) -> list[str]:
    return sorted(file.stem for file in (ROOT / folder).glob("*.py") if file.stem != "__init__")
