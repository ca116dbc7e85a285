"""State in pinned memory behind a GPU: training is bit-equal however late the streams are, and no wait is for nothing.

The device is RAM, whose streams are `tests/support/late_device.py`; tier and homes are those of a GPU.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memgraph.storage.mapped_storage import MappedBuffer, TensorSpec, buffer_slice_of, is_offloaded
from memgraph.storage.pinned_pool import PinnedError, PinnedPool
from memgraph.storage.pinned_storage import PinnedBufferAllocator
from memgraph.storage.transfer import offload_slices, reload_slices, wait_all
from tests.support.late_device import Late, Pinned
from tests.support.streamed_state import OPTIMIZERS, Twins, batch, far, least, streams

CPU = torch.device("cpu")
FORM = TensorSpec((30, 50), (50, 1), torch.float32)


@pytest.mark.long
@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_equals_eager_however_late_the_streams_are(kind: str, late: Late) -> None:
    twins = Twins(kind=kind, budget=least(kind))
    twins.train(2)
    for seed in range(6):
        late.seed(seed)
        with late.noting():
            twins.train(1)
    assert far(twins.module, twins.ours) >= {"parameter", "gradient"}
    assert streams(twins.model)


@pytest.mark.long
@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize(
    "missing",
    [("out", "compute"), ("back", "compute"), ("compute", "back")],
    ids=lambda pair: f"{pair[0]} for {pair[1]}",
)
def test_without_any_one_of_the_waits_it_does_not(missing: tuple[str, str], late: Late) -> None:
    twins = Twins(budget=least())
    twins.train(2)
    late.deaf = frozenset({missing})
    with pytest.raises(AssertionError):
        for seed in range(24):
            late.seed(seed)
            with late.noting():
                twins.train(1)


@pytest.mark.long
@pytest.mark.usefixtures("small_windows")
def test_updates_in_backward_equal_eagers(late: Late) -> None:
    twins = Twins(budget=least(fuse_update=True), fuse_update=True)

    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        made: Tensor = run(model, batch())
        made.backward()
        optimizer.step()
        optimizer.zero_grad()
        return made.detach()

    twins.train(2, step)
    for seed in range(6):
        late.seed(seed)
        with late.noting():
            twins.train(1, step)


@pytest.mark.long
@pytest.mark.usefixtures("small_windows", "late")
def test_loaded_state_is_offloaded_again() -> None:
    twins = Twins(budget=least())
    twins.train(2)
    for model, optimizer in ((twins.plain, twins.theirs), (twins.model, twins.ours)):
        model.load_state_dict({name: value.clone() * 0.5 for name, value in model.state_dict().items()})
        optimizer.load_state_dict(optimizer.state_dict())
    twins.train(2)
    assert far(twins.module, twins.ours) >= {"parameter", "gradient"}


# --- one home


def test_a_buffer_returns_its_pages_with_the_last_tensor_over_it(pool: PinnedPool) -> None:
    home = MappedBuffer([FORM, FORM], PinnedBufferAllocator(CPU, Late(0), pool))
    tensor = home.tensor(1)
    assert pool.claimed == pool.nbytes == 2 * 8192
    assert buffer_slice_of(tensor) == home.slice(1)
    assert is_offloaded(tensor)
    del home
    gc.collect()
    assert pool.claimed
    del tensor
    gc.collect()
    assert not pool.claimed


def test_bytes_go_there_and_back(pool: PinnedPool) -> None:
    home = MappedBuffer([FORM, FORM], PinnedBufferAllocator(CPU, Late(0), pool))
    sent, back = torch.randn(30, 50), torch.empty(30, 50)
    wait_all([offload_slices(home.slice(1), sent)])
    wait_all([reload_slices(home.slice(1), back)])
    assert torch.equal(sent, back)
    assert torch.equal(sent, home.tensor(1))
    assert not home.tensor(0).any()


def test_a_copy_comes_behind_another_one(pool: PinnedPool) -> None:
    for seed in range(16):
        late = Late(seed)
        home = MappedBuffer([FORM], PinnedBufferAllocator(CPU, late, pool))
        with late.noting():
            out = offload_slices(home.slice(0), torch.full((30, 50), float(seed)))
            back = torch.empty(30, 50)
            wait_all([reload_slices(home.slice(0), back, out.chunks)])
            found = back * 1
        assert torch.equal(found, torch.full((30, 50), float(seed)))


def test_more_than_is_allowed_is_an_error_and_takes_nothing() -> None:
    pool = PinnedPool(lambda: 8192, Pinned())
    with pytest.raises(PinnedError, match=r"16384 bytes of pinned host memory are wanted, .* and 8192 allowed"):
        MappedBuffer([FORM, FORM], PinnedBufferAllocator(CPU, Late(0), pool))
    assert not pool.claimed


def test_a_host_that_does_not_pin_is_an_error_and_takes_nothing() -> None:
    class Refusing(Pinned):
        def register(self, flat: Tensor, device: torch.device) -> str:
            return "no locked memory is left"

    pool = PinnedPool(lambda: 1 << 30, Refusing())
    with pytest.raises(
        PinnedError, match=r"8192 bytes .* can't be pinned \(no locked memory is left\); allow .*ulimit"
    ):
        MappedBuffer([FORM], PinnedBufferAllocator(CPU, Late(0), pool))
    assert not pool.claimed


def test_a_gpu_sees_pinned_bytes_where_they_are(pool: PinnedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def as_tensor(seen: Any, device: torch.device) -> Tensor:
        given.append((seen.__cuda_array_interface__, device))
        flat: Tensor = seen.flat
        return flat

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    home = MappedBuffer([FORM], PinnedBufferAllocator(CPU, Late(0), pool))
    home.mapping.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "empty", lambda *args, dtype, device: torch.zeros(*args, dtype=dtype))
    tensor = home.tensor(0)
    interface = {"shape": (6000,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3}
    assert given == [(interface, torch.device("cuda", 0))]
