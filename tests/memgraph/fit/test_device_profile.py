"""Profiles of devices: every file is complete, and a bad one is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from memgraph.fit.device_profile import profile_names, read_profile
from memgraph.fit.measured_profile import measured_profile


@pytest.mark.parametrize("name", profile_names())
def test_a_published_profile_names_a_source_for_each_figure(name: str) -> None:
    profile = read_profile(name)
    assert profile.name == name
    assert set(profile.sources) == {"flops", "bandwidth", "memory", "link", "libraries", "capability"}
    assert profile.capability is not None and profile.capability >= (7, 0) and profile.multiprocessors > 0
    assert profile.rates(torch.bfloat16).flops >= profile.rates(torch.float32).flops
    assert profile.rates(torch.int64) == profile.rates(torch.float32)


def test_a_profile_becomes_a_machine_in_bytes_per_microsecond() -> None:
    machine = read_profile("H200").machine(24 * 10**9)
    assert (machine.budget, machine.device, machine.tier) == (24 * 10**9, "cuda", "host")
    assert machine.link.out == machine.link.back == pytest.approx(64_000)  # 64 GB/s


def test_an_unknown_device_lists_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"no profile of the device 'h300'.*h100.*h200.*rtx4090"):
        read_profile("h300")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "tpu"}, "kind is 'tpu'"),
        ({"memory": 0}, "memory is 0"),
        ({"flops": {"bfloat16": 1}}, "no figure for float32"),
        ({"speed": 3}, "unknown speed"),
        ({"capability": [9]}, "not enough values"),
        ({"link": {"lanes": 16}}, "lanes"),
    ],
)
def test_a_file_that_is_no_profile_says_why(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    good = {"name": "x", "kind": "cuda", "memory": 1, "flops": {"float32": 1}, "bandwidth": 1}
    file = tmp_path / "x.json"
    file.write_text(json.dumps({**good, **change}))
    with pytest.raises(ValueError, match=f"holds no profile of a device: .*{reason}"):
        read_profile(str(file))


@pytest.mark.long
def test_the_profile_of_this_cpu_is_read_back_as_it_was_measured(tmp_path: Path) -> None:
    profile = measured_profile(tmp_path)
    file = tmp_path / "cpu.json"
    file.write_text(profile.to_json())
    assert read_profile(str(file)) == profile
    assert profile.machine(1).link.half_duplex and profile.machine(1).link.works
    assert profile.workspaces.keys() == {"aten.convolution.default", "aten.convolution_backward.default"}
