"""Copies that measure a link, under budgets that leave little room for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memgraph.profile import link_bandwidth
from memgraph.profile.link_bandwidth import Links, measure_casts, measure_disk, measure_host
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


@pytest.mark.parametrize("room", [100 * KB, 0, -1])
def test_where_no_copy_has_room_the_links_are_guessed_and_not_those_of_tiny_copies(
    room: int, tmp_path: Path, copied: list[int]
) -> None:
    every = measure_host(CPU, room), measure_casts(CPU, room), measure_disk(tmp_path, room)
    assert not copied and not link_bandwidth._known
    for links in every:
        for link in links:
            assert 256 * KB / link.us(256 * KB) == link.rate([32 * MB]) > 500  # bytes per microsecond
