"""The calls that pin pages with CUDA, as far as they can be tested without it."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from memgraph.storage.mapped_storage import MappedBuffer, TensorSpec
from memgraph.storage.pinned_pool import MMAP_FLAGS, REGISTER_FLAGS, CudaPinnedAllocator, PinnedPool
from memgraph.storage.pinned_storage import PinnedBufferAllocator
from memgraph.storage.spill_file import PAGE
from tests.support.late_device import Late, Pinned

GPU = torch.device("cuda", 1)


@pytest.fixture(name="asked")
def _asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the calls to CUDA, in order."""
    asked: list[Any] = []

    def note(*what: object) -> int:
        asked.append(what)
        return 0

    def call(name: str) -> Any:
        return lambda address, *args: note(name, *args)

    def on(device: torch.device) -> Any:
        note("on", device)
        return nullcontext()

    cudart = SimpleNamespace(cudaHostRegister=call("register"), cudaHostUnregister=call("unregister"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: note("all is done on", device))
    return asked


def test_pages_are_pinned_for_their_device_and_given_back_once_it_has_done_all(asked: list[Any]) -> None:
    """Memory is registered for the current device; kernels that read it may still run, so all are waited for."""
    pins, flat = CudaPinnedAllocator(), torch.zeros(4096, dtype=torch.uint8)
    assert pins.register(flat, GPU) == ""
    pins.unregister(flat)
    assert asked == [("on", GPU), ("register", 4096, REGISTER_FLAGS), ("all is done on", GPU), ("unregister",)]


def test_a_child_of_fork_gives_nothing_back(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pins, flat = CudaPinnedAllocator(), torch.zeros(4096, dtype=torch.uint8)
    pins.register(flat, GPU)
    asked.clear()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    pins.unregister(flat)
    assert asked == []


def covers(span: str, address: int) -> bool:
    """Return True if a span of addresses contains this one; equal neighbours may be one span."""
    begin, dash, end = span.partition("-")
    return bool(dash) and int(begin, 16) <= address < int(end, 16)


def test_a_buffer_is_private_pages_of_the_process() -> None:
    """Shared ones take several times as long to be had; after a fork, the device would be left with the old ones."""
    host = PinnedBufferAllocator(torch.device("cpu"), Late(0), PinnedPool(lambda: 1 << 30, Pinned()))
    home = MappedBuffer([TensorSpec((1 << 20,), (1,), torch.float32)], host)
    address = home.tensor(0).data_ptr()
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    first = next(line for line in lines if covers(line.split()[0], address))
    flags = next(line for line in lines if line.startswith("VmFlags:")).split()
    assert first.split()[1] == "rw-p" and "dc" in flags


def resident(flat: Tensor) -> list[bool]:
    """Return which pages of a tensor are in memory."""
    pages = (ctypes.c_ubyte * (flat.nbytes // PAGE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(flat.data_ptr()), ctypes.c_size_t(flat.nbytes), pages) == 0
    return [bool(page & 1) for page in pages]


def test_pages_are_there_before_they_are_pinned_and_keep_their_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = mmap.mmap(-1, 8 << 20, flags=MMAP_FLAGS)
    flat, found = torch.frombuffer(mapping, dtype=torch.uint8), list[bool]()
    flat[5 * PAGE] = 7
    assert sum(resident(flat)) < len(resident(flat)) // 2 + 1

    def register(address: int, nbytes: int, flags: int) -> int:
        found.extend(resident(flat))
        return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    assert CudaPinnedAllocator().register(flat, GPU) == ""
    assert all(found) and len(found) == (8 << 20) // PAGE
    assert flat[5 * PAGE] == 7 and flat.sum() == 7
