"""Prices of ops that were taken on a busy machine are timed again by the next process, and the plan says what they are."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from memgraph.profile import op_profiler
from memgraph.system import disturbance
from memgraph.system.disturbance import LIMIT, Watch
from memgraph.system.measurement_cache import read_all_cached, write_all_cached
from memgraph.system.timer import shortest_us


class Machine:
    """A machine whose other load is set; `plan` plans in a new process, and counts the ops that are timed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share, self.timed, self.keys, self.patch = 0.0, 0, list[str](), monkeypatch
        monkeypatch.setattr(disturbance, "LIMIT", LIMIT)
        monkeypatch.setattr(Watch, "disturbed", property(lambda watch: self.share))
        monkeypatch.setattr(op_profiler, "shortest_us", self._shortest_us)
        monkeypatch.setattr(op_profiler, "write_all_cached", self._write)

    def _shortest_us(self, *given: Any, **options: Any) -> float:
        self.timed += 1
        return shortest_us(*given, **options)

    def _write(self, values: dict[str, object]) -> None:
        self.keys += values
        write_all_cached(values)

    def plan(self, share: float) -> memgraph.Report:
        self.share, self.timed = share, 0
        self.patch.setattr(op_profiler, "_known", {})
        self.patch.setattr(disturbance, "_warned", [])
        return self._plan(self._plan("1GB").peak - 1)

    def _plan(self, budget: str | int) -> memgraph.Report:
        model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())))
        return memgraph.plan(model, torch.ones(64, 16), budget=budget, offload=None, loss=torch.sum)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    return Machine(monkeypatch)


def test_disturbed_prices_are_timed_once_by_each_process_until_they_are_not(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    busy = machine.plan(0.6)
    first = machine.timed
    assert first and busy.plan and busy.disturbed == 1.0
    assert "prices: 100% of the ops' time was measured while other work" in str(busy)
    assert any("a new process measures these ops once more" in said for said in caplog.messages)
    still = machine.plan(0.7)
    assert machine.timed == first and still.disturbed == 1.0
    quiet = machine.plan(0.0)
    assert machine.timed == first and quiet.disturbed == 0.0
    assert "other work" not in str(quiet)
    machine.plan(0.0)
    assert machine.timed == 0
    assert busy.peak == still.peak == quiet.peak


def test_a_report_on_disturbed_prices_is_saved_with_that(machine: Machine) -> None:
    busy = machine.plan(0.6)
    assert memgraph.Report.from_json(busy.to_json()).disturbed == 1.0


STRANGE: tuple[Any, ...] = (
    {"us": -1.0}, {"us": float("nan")}, {"us": "text"}, {"workspace": 1e300}, {"made": [["nn", [1], [1], 0, 4]]},
    {"made": [["float32", [1, 2], [1], 0, 4]]}, {"made": 3}, {"disturbed": []}, {"us": None}, "text", [],
)  # fmt: skip


def test_a_price_with_strange_values_is_a_miss(machine: Machine) -> None:
    before, first = machine.plan(0.0), machine.timed
    kept = read_all_cached(machine.keys)
    without = [{"us": ..., name: ...} for name in ("workspace", "made")]
    strange = [*STRANGE, {"us": ...}, *without]
    for begin in range(0, len(strange), len(kept)):
        chosen = itertools.cycle(strange[begin : begin + len(kept)])
        write_all_cached({key: _with(cost, change) for (key, cost), change in zip(kept.items(), chosen, strict=False)})
        after = machine.plan(0.0)
        assert (after.peak, machine.timed) == (before.peak, first)


def _with(cost: dict[str, object], change: Any) -> object:
    """Return the cost with other values, without those that are ..., or what is no cost at all."""
    if not isinstance(change, dict):
        return change
    return {name: value for name, value in {**cost, **change}.items() if value is not ...}
