"""The time that compute loses to copies is measured once for a file system, and becomes part of the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memgraph
from memgraph.profile import machine_profile
from memgraph.profile.link_bandwidth import Link
from memgraph.profile.machine_profile import CopyOverhead, measure_copy_overhead, measure_links
from memgraph.report.tables import ms
from memgraph.system import measurement_cache
from passes import Machine

LINK = Link(((1 << 20, 2000.0),))
SLOW = Link(((1 << 20, 1e6),))


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine_profile, "_known", {})
    monkeypatch.setattr(measurement_cache, "_open", {})


def test_copy_overhead_is_measured_once_for_a_file_system_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.get_rng_state()
    found = measure_copy_overhead(tmp_path, (LINK, LINK))
    assert found.us_per_copy > 0.0
    assert found.us_per_byte >= 0.0
    assert torch.equal(torch.get_rng_state(), random)
    monkeypatch.setattr(machine_profile, "_known", {})
    monkeypatch.setattr(machine_profile, "_measure", lambda *given: pytest.fail("measured again"))
    assert measure_copy_overhead(tmp_path, (LINK, LINK)) == found


def test_copies_to_a_slow_disk_have_no_overhead_per_byte(tmp_path: Path) -> None:
    assert measure_copy_overhead(tmp_path, (SLOW, LINK)).us_per_byte == 0.0


def test_copies_of_a_gpu_have_no_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_profile, "measure_files", lambda folder, room: (LINK, LINK))
    monkeypatch.setattr(machine_profile, "measure_host", lambda device, room: (LINK, LINK))
    monkeypatch.setattr(machine_profile, "measure_copy_overhead", lambda folder, links, room: CopyOverhead(60.0, 1e-4))
    disk = measure_links(Machine(1), "disk", torch.device("cpu"), tmp_path)
    host = measure_links(Machine(1, "cuda"), "host", torch.device("cuda"), None)
    assert (disk.link.call_us, disk.link.us_per_byte, disk.link.overhead_us(1000)) == (60.0, 1e-4, 60.1)
    assert (host.link.call_us, host.link.us_per_byte) == (0.0, 0.0)


def test_a_report_tells_the_first_prediction_from_the_one_after_a_step() -> None:
    report = memgraph.plan(torch.nn.Linear(4, 4), torch.ones(2, 4), budget=1 << 30)
    first = report.forecast.us
    assert report.predicted_us == first
    assert f"time: forecast {ms(first)}, +0.0%; as it is" in str(report)
    after = replace(report, measured_us=5000.0, repriced_us=4000.0)
    assert after.predicted_us == first
    assert "took 5.0 ms; forecast with the times of its own ops 4.0 ms" in str(after)
