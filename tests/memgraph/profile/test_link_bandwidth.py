"""Copies that measure a link, under budgets that leave little room for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memgraph
from memgraph.profile import link_bandwidth, machine_profile
from memgraph.profile.link_bandwidth import Link, Links, measure_casts, measure_files, measure_host
from memgraph.profile.machine_profile import CopyOverhead
from memgraph.system.device import CPU

KB, MB = 1 << 10, 1 << 20


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are copied; nothing is known of any link."""
    sizes: list[int] = []

    def speed(device: object, nbytes: int, line: int) -> tuple[float, float]:
        sizes.append(nbytes)
        return 100.0, 50.0

    monkeypatch.setattr(link_bandwidth, "_known", {})
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(link_bandwidth, "pinned_speed", speed)
    return sizes


@pytest.mark.parametrize(
    ("room", "expected"),
    [(None, [256 * KB, 4 * MB, 32 * MB]), (5 * MB, [256 * KB, 4 * MB]), (300 * KB, [256 * KB])],
)
def test_copies_to_pinned_memory_that_have_no_room_are_left_out(
    room: int | None, expected: list[int], copied: list[int]
) -> None:
    out, back = measure_host(CPU, room)
    assert copied == expected
    assert [nbytes for nbytes, _ in out.points] == expected and out.rate([8 * MB]) == 2 * back.rate([8 * MB]) == 100


def test_so_are_casts(copied: list[int]) -> None:
    def sizes(links: Links) -> list[int]:
        return [nbytes for nbytes, _ in links[0].points]

    assert sizes(measure_casts(CPU, 12 * MB)) == [256 * KB, 4 * MB]
    assert sizes(measure_casts(CPU, 800 * KB)) == [256 * KB]


@pytest.mark.parametrize("share", [0.7, 1.5])
def test_a_model_beyond_the_budget_has_the_rate_of_its_parameters(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is slow to answer, small copies have a ninth of the rate of large ones."""
    link = Link(((256 * KB, 5000.0), (4 * MB, 9000.0), (32 * MB, 40000.0)))
    monkeypatch.setattr(machine_profile, "measure_files", lambda folder, room: (link, link))
    monkeypatch.setattr(machine_profile, "measure_copy_overhead", lambda *_: CopyOverhead())
    model, x = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))), torch.randn(16, 1024)
    budget = round(share * 16 * MB)
    plan = memgraph.plan(model, x, target=x, loss=F.mse_loss, budget=budget, time_limit=0.1, offload="disk")
    large, small = link.rate([4 * MB]), link.rate([64 * KB])
    assert plan.machine.link.back > 0.8 * large if share < 1 else plan.machine.link.back < 1.1 * small


@pytest.mark.parametrize("room", [100 * KB, 0, -1])
def test_where_no_copy_has_room_the_links_are_guessed_and_not_those_of_tiny_copies(
    room: int, tmp_path: Path, copied: list[int]
) -> None:
    every = measure_host(CPU, room), measure_casts(CPU, room), measure_files(tmp_path, room)
    assert not copied and not link_bandwidth._known
    for links in every:
        for link in links:
            assert 256 * KB / link.us(256 * KB) == link.rate([32 * MB]) > 500  # bytes per microsecond
