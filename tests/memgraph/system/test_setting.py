"""The key of a measurement on a GPU names the device and its driver."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memgraph.system.setting import driver, environment_key

GPU = torch.device("cuda", 0)


def library(failing: bool = False) -> Any:
    """A replacement of NVIDIA's library."""

    def version(text: Any, size: int) -> int:
        text.value = b"580.159.03"
        return 0

    return SimpleNamespace(nvmlInit_v2=lambda: 9 if failing else 0, nvmlSystemGetDriverVersion=version)


def test_a_setting_on_a_gpu_names_the_device_and_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    there = environment_key.__wrapped__(GPU)
    assert "NVIDIA H200 | 9.0 | driver 580.159.03, cuDNN 91900" in there


def test_a_driver_that_says_nothing_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Any:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    for found in (lambda _: library(failing=True), lambda _: SimpleNamespace(), missing):
        monkeypatch.setattr(ctypes, "CDLL", found)
        assert driver() == ""
