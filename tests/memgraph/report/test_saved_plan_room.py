"""The text of a saved plan does not depend on the free bytes of the disk, if all offloaded values fit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import memgraph
from tests.support.models import batch, net


@pytest.mark.long
def test_the_text_does_not_tell_how_much_of_the_disk_was_free(monkeypatch: pytest.MonkeyPatch) -> None:
    room = memgraph.plan(net(), batch(), budget="1GB").peak

    def with_free(free: int) -> memgraph.Report:
        disk = SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=1)
        monkeypatch.setattr("memgraph.storage.spill_file.os.statvfs", lambda _: disk)
        return replace(memgraph.plan(net(), batch(), budget=room - 50_000), planned_us=0.0)

    one, other = with_free(10**11), with_free(10**12)
    assert (one.machine.link.capacity, other.machine.link.capacity) == (10**11, 10**12)
    assert one.to_json() == other.to_json()
    assert one.plan == memgraph.SavedPlan.from_json(one.to_json()).plan != ()
