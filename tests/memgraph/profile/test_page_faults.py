"""Which ops take new pages is asked of the allocator, and what a page takes is measured once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memgraph.profile import page_faults
from memgraph.profile.page_faults import page_faults_us
from passes import Machine, parse, predict

ROOT = Path(__file__).parents[3]
STEP = """
    forward:
    w = parameter()  # makes w:4000000
    d = tangent()  # makes d:4
    a = mm(w)  # f32[250000] | makes a:1000000 | 10.0 us
    b = relu(a)  # f32[16] | makes b:64 | 10.0 us | workspace 2000000
    c = mm(b)  # f32[4000000] | makes c:16000000 | 10.0 us
    o = sum(c)  # f32[1] | makes o:4 | 10.0 us
    backward:
    e = expand(d)  # f32[250000] | makes e:1000000 | 10.0 us
    g = mm_backward(e, a)  # f32[1000000] | makes g:4000000 | 10.0 us
    return output o, gradient g
"""
ASK = f"""
from memgraph.system.device import return_freed_memory
from memgraph.profile.page_faults import fresh_nbytes
from passes import parse
import torch
hole = torch.empty(120_000, dtype=torch.uint8)
return_freed_memory()
print(new_nbytes(parse('''{STEP}''')))
"""


def test_values_of_the_size_that_goes_back_at_once_take_new_pages() -> None:
    """In a process of its own, in which nothing large was freed before; `c` is so large that its own price has them."""
    told = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, cwd=ROOT, check=True)
    assert told.stdout == "{'a': 1000000, 'b': 2000000, 'e': 1000000, 'g': 4000000}\n"


def test_a_step_is_longer_by_its_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_faults, "returns_freed_memory", lambda: True)
    monkeypatch.setattr(page_faults, "fresh_nbytes", lambda trace: {"a": 8192, "g": 4096})
    monkeypatch.setattr(page_faults, "page_fault_us", lambda: 2.0)
    machine = Machine(1 << 30)
    forecast = predict(parse(STEP), machine)
    assert page_faults_us(forecast, machine) == 6.0
    assert page_faults_us(forecast, Machine(1 << 30, "cuda")) == 0.0
    monkeypatch.setattr(page_faults, "returns_freed_memory", lambda: False)
    assert page_faults_us(forecast, machine) == 0.0


def test_a_page_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(page_faults, "_known", {})
    us = page_faults.page_fault_us()
    assert us >= 0.0
    monkeypatch.setattr(page_faults, "_known", {})
    monkeypatch.setattr(page_faults, "_measure", lambda: pytest.fail("measured again"))
    assert page_faults.page_fault_us() == us
