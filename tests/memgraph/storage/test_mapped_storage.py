"""A mapped tensor is an ordinary one for everyone else, takes no anonymous memory, and leaves nothing behind."""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memgraph.storage import io_threads
from memgraph.storage.async_copy import CopyChunk
from memgraph.storage.mapped_storage import MappedBuffer, TensorSpec, buffer_slice_of, tensor_spec_of
from memgraph.storage.spill_file import PAGE, SpillError
from memgraph.storage.transfer import offload_slices, offload_tensors, reload_slices, slice_of
from tests.support.forks import forked

SHM = Path("/dev/shm")
DTYPES = [torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.complex64]
LAYOUTS = {
    "flat": torch.empty(70001),
    "matrix": torch.empty(30, 500),
    "transposed": torch.empty(30, 500).t(),
    "channels last": torch.empty(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "scalar": torch.empty(()),
    "empty": torch.empty(3, 0, 4),
}
MB = 1 << 20


def form(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return tensor_spec_of(torch.empty(shape, dtype=dtype, device="meta"))


def noise(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Random values with the same strides."""
    made = torch.randn_like(like)
    return (made > 0) if dtype is torch.bool else (made * 50).abs().to(dtype)


def fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def maps(folder: Path) -> list[str]:
    """The files of `folder` that are in memory."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def anonymous() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


# --- what is in a home is what it was


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_is_offloaded_as_it_is(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    there = noise(LAYOUTS[layout], dtype)
    home, other = offload_tensors([there, noise(LAYOUTS["flat"], dtype)], tmp_path)
    assert torch.equal(home, there)
    assert tensor_spec_of(home) == tensor_spec_of(there)
    assert (buffer_slice_of(home) is None) == (not there.numel())
    home.copy_(home.logical_not())
    assert torch.equal(home, there.logical_not().to(dtype))
    assert other.data_ptr() != home.data_ptr()


def test_a_new_buffer_is_all_zeros(tmp_path: Path) -> None:
    home = MappedBuffer([form(5000), form(3)], tmp_path)
    assert not home.tensor(0).any() and not home.tensor(1).any()


@pytest.mark.parametrize("strides", [(2,), (0,)], ids=["gaps", "overlap"])
def test_a_form_that_is_not_dense_is_refused(tmp_path: Path, strides: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a buffer takes dense tensors, not shape"):
        MappedBuffer([TensorSpec((5,), strides, torch.float32)], tmp_path)


def moved(module: nn.Module, folder: Path) -> nn.Module:
    for parameter, home in zip(module.parameters(), offload_tensors(list(module.parameters()), folder), strict=True):
        parameter.data = home
    return module


def test_an_offloaded_module_trains_loads_and_saves_as_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(50, 70), nn.GELU(), nn.Linear(70, 3))
    home = moved(copy.deepcopy(plain), tmp_path)
    x = torch.randn(9, 50)
    for module in (plain, home):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
    assert all(map(torch.equal, plain.state_dict().values(), home.state_dict().values()))
    values = {name: value.clone().zero_() for name, value in home.state_dict().items()}
    home.load_state_dict(values)
    assert all(buffer_slice_of(p) is not None and not p.any() for p in home.parameters())


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda held: pickle.loads(pickle.dumps(held)),
    "torch.save": lambda held: torch.load(io.BytesIO(saved(held)), weights_only=False),
    "clone": lambda held: held.clone(),
}


def saved(held: Any) -> bytes:
    file = io.BytesIO()
    torch.save(held, file)
    return file.getvalue()


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_plain_memory_and_no_larger_than_its_tensor(tmp_path: Path, way: str) -> None:
    parameter = nn.Parameter(torch.randn(300, 7))
    parameter.data, _ = offload_tensors([parameter.data, torch.zeros(MB)], tmp_path)
    again = COPIES[way](parameter)
    assert torch.equal(again, parameter) and buffer_slice_of(again) is None
    assert again.untyped_storage().nbytes() == parameter.nbytes
    assert len(saved(parameter)) < 2 * parameter.nbytes


# --- where it lies


def test_the_place_of_a_tensor_is_found_by_its_address(tmp_path: Path) -> None:
    home = MappedBuffer([form(3), form(5000), form(0), form(7)], tmp_path)
    tensors = [home.tensor(i) for i in range(4)]
    assert [buffer_slice_of(tensor) for tensor in tensors] == [home.slice(0), home.slice(1), None, home.slice(3)]
    parameter = nn.Parameter(torch.zeros(5000))
    assert buffer_slice_of(parameter) is None
    parameter.data = tensors[1]
    assert buffer_slice_of(parameter) == buffer_slice_of(parameter.view(50, 100).t()) == home.slice(1)
    parameter.data = torch.zeros(5000)
    assert buffer_slice_of(parameter) is None


def test_a_part_has_a_place_only_where_whole_pages_are_its_own(tmp_path: Path) -> None:
    (tensor,) = offload_tensors([torch.zeros(5000)], tmp_path)
    place, page = buffer_slice_of(tensor), PAGE // 4
    assert place is not None
    assert buffer_slice_of(tensor[page : 3 * page]) == slice_of(place, PAGE, 2 * PAGE)
    assert buffer_slice_of(tensor[page:]) == slice_of(place, PAGE, 20000 - PAGE)
    for other in (tensor[1:], tensor[:-1], tensor[::2], tensor[:0], tensor.expand(2, 5000), tensor.clone()):
        assert buffer_slice_of(other) is None


@pytest.mark.parametrize("other", [torch.zeros(3, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"])
def test_what_is_no_plain_memory_has_no_place(other: Tensor) -> None:
    assert buffer_slice_of(other) is None


def test_what_is_offloaded_is_not_offloaded_again(tmp_path: Path) -> None:
    (tensor,) = offload_tensors([torch.zeros(5000)], tmp_path)
    again, other = offload_tensors([tensor, torch.ones(2)], tmp_path)
    assert again is tensor and other.sum() == 2


# --- the file and the mapping agree


@pytest.mark.parametrize("folder", [None, SHM], ids=["disk", "ram"])
def test_the_file_and_the_mapping_agree_whoever_wrote(tmp_path: Path, folder: Path | None) -> None:
    count, draw = 3 * MB // 4 + 17, random.Random(0)
    home = MappedBuffer([form(count, dtype=torch.int32)], folder or tmp_path)
    mapped, place, expected = home.tensor(0), home.slice(0), torch.zeros(count, dtype=torch.int32)
    memory = torch.empty_like(expected)
    for i in range(200):
        begin = draw.randrange(count)
        end = min(count, begin + draw.choice([1, 100, 5000, 500000]))
        action = draw.choice(["write mapped", "read mapped", "write file", "read file"])
        if action == "write mapped":
            mapped[begin:end] = expected[begin:end] = i
        elif action == "write file":
            expected[begin:end] = -i
            offload_slices(place, memory.copy_(expected)).end()
        elif action == "read file":
            reload_slices(place, memory.zero_()).end()
            assert torch.equal(memory, expected)
        else:
            assert torch.equal(mapped, expected)


def test_bytes_beyond_the_end_of_a_slice_are_unused(tmp_path: Path) -> None:
    first, second = offload_tensors([torch.ones(3), torch.ones(5)], tmp_path)
    for tensor in (first, second):
        place = buffer_slice_of(tensor)
        assert place is not None
        offload_slices(place, torch.full_like(tensor, 7)).end()
    assert first.tolist() == [7] * 3 and second.tolist() == [7] * 5


# --- memory


def test_what_is_offloaded_is_no_anonymous_memory(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(100 * MB // 4))
    offload_tensors([torch.ones(MB)], tmp_path)  # so that the threads have their buffers
    before = most = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    (home,) = offload_tensors([parameter.data], tmp_path)
    done.set()
    watcher.join()
    assert most - before < 5 * MB  # and not another 100
    parameter.data = home
    assert before - anonymous() > 95 * MB
    home.add_(1)
    assert home.sum() == 2 * home.numel()
    assert before - anonymous() > 95 * MB


def test_a_buffer_is_freed_with_its_last_tensor(tmp_path: Path) -> None:
    gc.collect()
    before = fds()
    home = MappedBuffer([form(5000), form(3)], tmp_path)
    tensor = home.tensor(0)
    view = tensor[7:]
    del home, tensor
    view.fill_(3)
    assert len(maps(tmp_path)) == 1 and fds() > before
    del view
    assert not maps(tmp_path) and fds() == before


def test_a_running_copy_keeps_its_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before, reached, opened = fds(), threading.Event(), threading.Event()
    transfer = io_threads.transfer_pages

    def waits(*where: Any) -> None:
        reached.set()
        assert opened.wait(60)
        transfer(*where)

    home = MappedBuffer([form(5000)], tmp_path)
    place, memory = home.slice(0), torch.ones(5000)
    monkeypatch.setattr(io_threads, "transfer_pages", waits)
    copying = reload_slices(place, memory)
    assert reached.wait(60)
    del home, place
    assert len(maps(tmp_path)) == 1
    opened.set()
    copying.end()
    assert not memory.any()
    del copying
    assert not maps(tmp_path) and fds() == before


def test_a_finished_copy_references_nothing_however_late_its_thread_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, plain = threading.Event(), CopyChunk.set

    def late(chunk: CopyChunk) -> None:
        plain(chunk)
        assert opened.wait(60)

    monkeypatch.setattr(CopyChunk, "set", late)
    home, memory = MappedBuffer([form(5000)], tmp_path), torch.ones(5000)
    seen = weakref.ref(memory)
    try:
        offload_slices(home.slice(0), memory).end()
        del home, memory
        assert seen() is None and not maps(tmp_path)
    finally:
        opened.set()


def test_many_buffers_come_and_go(tmp_path: Path) -> None:
    gc.collect()
    before = fds()
    for _ in range(300):
        assert offload_tensors([torch.ones(10)], tmp_path)[0].sum() == 10
    assert fds() == before


# --- faults


def test_a_buffer_that_the_disk_has_no_space_for_is_refused(tmp_path: Path) -> None:
    gc.collect()
    before = fds()
    with pytest.raises(SpillError, match=r"bytes are wanted for the state in .*, .* are available"):
        MappedBuffer([form(1 << 50)], tmp_path)
    assert fds() == before


def test_a_disk_that_fills_up_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before, tensor = fds(), torch.ones(5000)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for where, name in ((os, "posix_fallocate"), (io_threads, "transfer_pages")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, full)
            with pytest.raises(SpillError, match="No space left on device"):
                offload_tensors([tensor], tmp_path)
    assert buffer_slice_of(tensor) is None and tensor.sum() == 5000
    gc.collect()
    assert fds() == before and not maps(tmp_path)


def test_a_forked_child_has_buffers_of_its_own_and_its_writes_do_not_reach_its_parents(tmp_path: Path) -> None:
    (tensor,) = offload_tensors([torch.ones(5000)], tmp_path)

    def work() -> bool:
        known = buffer_slice_of(tensor)
        tensor.add_(1)
        (own,) = offload_tensors([tensor], tmp_path)
        place, memory = buffer_slice_of(own), torch.zeros(5000)
        assert place is not None
        reload_slices(place, memory).end()
        return known is None and memory.tolist() == tensor.tolist() == [2] * 5000

    assert forked(work).code() == 0
    assert torch.equal(offload_tensors([tensor], tmp_path)[0], torch.ones(5000))
