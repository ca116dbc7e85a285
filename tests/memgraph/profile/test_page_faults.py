"""The allocator decides which ops get new pages, and the time of a page is measured once."""

from __future__ import annotations

import mmap
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.graph.halves import buffer_reuse
from memgraph.profile import page_faults
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.profile.page_faults import fresh_nbytes, page_faults_us
from passes import Machine, parse, predict
from passes.schedule.buffer_reuse import reused_buffers, with_buffer_reuse

ROOT = Path(__file__).parents[3]
STEP = """
    forward:
    w = parameter()  # makes w:4000000
    d = tangent()  # makes d:4
    a = mm(w)  # f32[250000] | makes a:1000000 | 10.0 us
    b = relu(a)  # f32[16] | makes b:64 | 10.0 us | workspace 2000000
    c = mm(b)  # f32[10000000] | makes c:40000000 | 10.0 us
    o = sum(c)  # f32[1] | makes o:4 | 10.0 us
    backward:
    e = expand(d)  # f32[250000] | makes e:1000000 | 10.0 us
    g = mm_backward(e, a)  # f32[1000000] | makes g:4000000 | 10.0 us
    return output o, gradient g
"""
ASK = f"""
from memgraph.system.device import return_freed_memory
from memgraph.profile.page_faults import _is_new, fresh_nbytes
from passes import parse
import torch
hole = torch.empty(120_000, dtype=torch.uint8)
return_freed_memory()
taken = []
while not (taken and _is_new(taken[-1])):
    taken.append(torch.empty(1_000_000, dtype=torch.uint8))
del taken[-1]
print(fresh_nbytes(parse('''{STEP}''')))
"""

KEPT_PAGES = """
import resource, torch
from memgraph.system.device import keeping_freed_memory, return_freed_memory
return_freed_memory()
with keeping_freed_memory():
    for i in range(40):
        if i == 30:  # by now glibc has a gap that takes such a block: aligned ones do not fit each freed one
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(2 << 20).fill_(1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_values_of_the_size_that_goes_back_at_once_take_new_pages() -> None:
    """Runs in a process whose gaps are taken. The price of `c` contains its page faults already."""
    told = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, cwd=ROOT, check=True)
    assert told.stdout == "{'a': 1000000, 'b': 2000000, 'e': 1000000, 'g': 4000000}\n"


def test_what_is_timed_while_freed_memory_is_kept_takes_no_new_pages() -> None:
    """Eager keeps freed blocks of this size, after the first few."""
    assert int(child(KEPT_PAGES)) < (8 << 20) // resource.getpagesize()


def test_the_new_pages_of_a_step_are_those_that_the_system_gives() -> None:
    """Values of 8 MiB, which eager reuses: where they were taken for pages that are in an op's own price, a tenth of
    what the step takes was told."""
    told, given = map(int, child("from tests.memgraph.profile.test_page_faults import step; step()").split())
    assert 0.8 * given < told < 1.2 * given


def step() -> None:
    """Print the new pages of five planned steps, each as it is forecast just before, and as the system gives them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = Layers(), torch.ones(2048, 1024)
    plain, there = memgraph.plan(model, x, budget=1 << 34).peak, resident_bytes([*model.parameters(), x])
    compiled = memgraph.compile(model, 2 * there + (plain - 2 * there) * 7 // 10, offload=None)
    reused: list[dict[str, str]] = []

    def noted(*args: Any) -> dict[str, str]:
        reused.append(reused_buffers(*args))
        return reused[-1]

    def train() -> None:
        model.zero_grad()
        compiled(x).backward()

    told = given = 0
    with mock.patch.object(buffer_reuse, "reused_buffers", noted):
        for _ in range(3):  # afterwards nothing is planned again
            train()
        for _ in range(5):  # glibc has gaps that move from step to step
            trace = with_buffer_reuse(compiled.plan.forecast.trace, reused[-1])
            told += sum(fresh_nbytes(trace).values()) // mmap.PAGESIZE
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            train()
            given += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert compiled.plan.decisions and reused[-1]
    print(told, given)


class Layers(nn.Module):
    """Values of 8 MiB, with little compute."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(1024) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return x.square().mean()


def child(code: str) -> str:
    """Return the output of another process."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_plan_that_takes_anothers_place_is_compared_with_the_same_step() -> None:
    """The ops of the later plan were timed in a step, with the page faults of a plan."""
    first = memgraph.plan(nn.Linear(4, 4), torch.ones(2, 4), budget=1 << 30)
    first = replace(first, pages_us=first.forecast.us, adding=3)
    assert first.longer == 1.0
    slow = replace(first.choice, captured=replace(first.choice.captured, us=9e9))
    later = replace(first, choice=slow, pages_us=0.0, adding=0).after(first)
    assert (later.as_it_is_us, later.adding) == (first.choice.captured.us, 3)
    assert later.after(later).as_it_is_us == first.choice.captured.us


def test_no_more_is_allocated_than_there_is_room_for() -> None:
    trace = parse(STEP)
    _, all_of_them = measure_peak(lambda: fresh_nbytes(trace))
    fresh, some = measure_peak(lambda: fresh_nbytes(trace, 3_000_064))
    assert all_of_them is not None and some is not None
    assert all_of_them.peak == 41_000_064 and some.peak == 3_000_064
    assert fresh["g"] == 4_000_000  # for which there is no room


def test_a_step_is_longer_by_its_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_faults, "returns_freed_memory", lambda: True)
    monkeypatch.setattr(page_faults, "fresh_nbytes", lambda trace, room: {"a": 8192, "g": 4096})
    monkeypatch.setattr(page_faults, "page_fault_us", lambda room: 2.0)
    machine = Machine(1 << 30)
    forecast = predict(parse(STEP), machine)
    assert page_faults_us(forecast, machine, {}) == 6.0
    assert page_faults_us(forecast, Machine(1 << 30, "cuda"), {}) == 0.0
    monkeypatch.setattr(page_faults, "returns_freed_memory", lambda: False)
    assert page_faults_us(forecast, machine, {}) == 0.0


def test_a_page_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(page_faults, "_known", {})
    us = page_faults.page_fault_us()
    assert us >= 0.0
    monkeypatch.setattr(page_faults, "_known", {})
    monkeypatch.setattr(page_faults, "_measure", lambda: pytest.fail("measured again"))
    assert page_faults.page_fault_us() == us
