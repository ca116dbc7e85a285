"""The bytes that measuring the machine may take, in a budget that a model keeps and in one that it does not."""

from __future__ import annotations

import pytest

from memgraph.profile import page_faults
from memgraph.profile.measuring_room import rates_room
from memgraph.profile.page_faults import page_faults_us
from passes import Machine, parse, predict

STEP = """
    forward:
    w = parameter()  # makes w:4000000
    a = mm(w)  # f32[250000] | makes a:1000000 | 10.0 us
    return output a
"""


def test_the_budget_is_kept_where_it_can_be() -> None:
    assert rates_room(None, 30) is None
    assert rates_room(0, 30) == 0 and rates_room(7, 30) == 7


def test_beside_a_model_beyond_the_budget_there_is_a_sixteenth_of_it() -> None:
    assert rates_room(-98, 30) == 8


def test_so_it_is_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[int | None] = []

    def seen(room: int | None) -> float:
        rooms.append(room)
        return 0.0

    monkeypatch.setattr(page_faults, "page_fault_us", seen)
    monkeypatch.setattr(page_faults, "returns_freed_memory", lambda: True)
    machine = Machine(1_000_000)
    forecast = predict(parse(STEP), machine)
    for resident in (4_000_000, 900_000, None):
        page_faults_us(forecast, machine, {}, resident)
    assert rooms == [250_000, 100_000, None]
