"""The benchmark of arenas measures each share, and where a share is too small, the smallest budget that works."""

from __future__ import annotations

import pytest
import torch

from benchmarks import arena_steps
from benchmarks.blocks import SHAPES


@pytest.mark.long
def test_each_share_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_steps, "SHARES", (0.9, 0.01))
    found = list(arena_steps.rows(torch.device("cpu"), {"toy": SHAPES["gpt2-xl"].toy()}, laps=1))
    assert [figure.name for figure in found if figure.unit == "ms"] == [
        f"toy at {share}, {where}: a step" for share in ("90%", "1%") for where in ("outside an arena", "outside")
    ]
    allocated = [figure.value for figure in found if figure.name.endswith("outside: allocated")]
    assert 0 < allocated[1] < allocated[0]
