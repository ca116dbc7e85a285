"""Updates whose gradients come one by one are read ahead and written late, to the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.optim.fused_update import FusedUpdate
from memgraph.optim.offloaded_update import OffloadedUpdate
from memgraph.optim.window_memory import OffloadedTensors, window_bytes
from memgraph.optim.windowed_update import WindowedUpdate
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.storage.mapped_storage import buffer_slice_of
from memgraph.storage.spill_file import SpillError
from memgraph.storage.transfer import offload_tensors
from memgraph.tensors.parameter_groups import state_tensors
from tests.support.faults import failing
from tests.support.fused_updates import fused, smallest, steps
from tests.support.slow_disk import Gate, drain
from tests.support.streamed_state import batch, far, same
from tests.support.windowed_training import ALL, OPTIMIZERS, training

WINDOW = 200_000
SHAPES = ((70, 300), (40_001,), (1000, 33), (20_000,))


def parameters(folder: Path | None) -> list[nn.Parameter]:
    """Parameters of several sizes, on disk if there is a folder for them; the third lies column by column."""
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    tensors[2] = tensors[2].t()
    return [nn.Parameter(tensor) for tensor in (tensors if folder is None else offload_tensors(tensors, folder))]


def gradients(like: list[nn.Parameter], seed: int) -> list[Tensor]:
    """One for each; the second is one number seen as many, and the fourth leaves gaps in memory."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(tuple(parameter.shape), generator=generator) for parameter in like]
    made[1] = torch.randn((), generator=generator).expand(like[1].shape)
    made[3] = torch.randn(2 * like[3].numel(), generator=generator)[::2]
    return made


def everywhere(parameter: Tensor) -> bool:
    return True


def nowhere(parameter: Tensor) -> bool:
    return False


def relay(optimizer: Any, order: list[nn.Parameter], folder: Path, nbytes: int = WINDOW) -> WindowedUpdate:
    return WindowedUpdate(optimizer, nbytes, everywhere, folder, gradient_order=order)


@pytest.mark.long
@pytest.mark.parametrize("nbytes", [WINDOW, 1 << 20])
@pytest.mark.parametrize(
    "name", ["SGD nesterov", "AdamW", "Adam amsgrad", "AdamW foreach", "RMSprop centered", "RAdam"]
)
def test_updates_one_by_one_are_the_plain_ones(tmp_path: Path, name: str, nbytes: int) -> None:
    ours, theirs = parameters(tmp_path), parameters(None)
    optimizer, plain = OPTIMIZERS[name](ours), OPTIMIZERS[name](theirs)
    for seed in range(7):
        order = [ours[i] for i in (2, 0, 3, 1)]
        one = relay(optimizer, order, tmp_path, nbytes)
        given = dict(zip(ours, gradients(ours, seed), strict=True))
        for parameter in order:
            with torch.no_grad():
                one.update(parameter, given[parameter].clone(memory_format=torch.preserve_format))
        one.finish()
        for parameter, gradient in zip(theirs, gradients(theirs, seed), strict=True):
            parameter.grad = gradient
        plain.step()
        assert all(map(torch.equal, ours, theirs))
        states, others = ([list(o.state[p].values()) for p in row] for o, row in ((optimizer, ours), (plain, theirs)))
        assert all(same(mine, yours) for mine, yours in zip(states, others, strict=True))
    assert all(buffer_slice_of(parameter.detach()) for parameter in ours)


def test_the_next_parameter_is_read_while_the_last_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter has one window here: what is written late is all of it."""
    ours = parameters(tmp_path)[:2]
    optimizer = OPTIMIZERS["SGD"](ours)
    before = [parameter.detach().clone() for parameter in ours]
    one = relay(optimizer, ours, tmp_path, 1 << 20)
    with monkeypatch.context() as patch, torch.no_grad():
        gate = Gate(patch)
        one.update(ours[0], torch.ones(SHAPES[0]))
        assert gate.reached.wait(60) and not gate.written
        assert list(one.filled) == [1] and one.finished == 0
        gate.opened.set()
        one.finish()
        assert gate.written and one.finished == one.computed == 1
    assert torch.equal(ours[0], before[0] - 0.1)
    assert torch.equal(ours[1], before[1])
    drain()


def test_the_gradient_is_gone_when_its_update_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the windows are still being written."""
    ours = parameters(tmp_path)
    one = relay(OPTIMIZERS["AdamW"](ours), ours, tmp_path)
    with monkeypatch.context() as patch, torch.no_grad():
        gate = Gate(patch)
        gate.opened.set()
        gradient = torch.ones(SHAPES[0])
        storage = gradient.untyped_storage()
        one.update(ours[0], gradient)
        del gradient
        assert torch._C._storage_Use_Count(storage._cdata) == 1
        one.finish()
    drain()


@pytest.mark.parametrize("states", [everywhere, nowhere])
def test_what_stays_between_two_updates_is_known_before(tmp_path: Path, states: Callable[[Tensor], bool]) -> None:
    ours = parameters(tmp_path)
    optimizer = OPTIMIZERS["AdamW"](ours)
    foreseen = window_bytes(optimizer, WINDOW, OffloadedTensors(everywhere, everywhere, states), ours, separate=True)[0]
    one = WindowedUpdate(optimizer, WINDOW, states, tmp_path, gradient_order=ours)
    assert resident_bytes(one.buffers) <= foreseen.windows <= foreseen.between <= foreseen.total

    def update() -> None:
        for parameter in ours:
            one.update(parameter, torch.ones(()).expand(parameter.shape))

    with torch.no_grad():
        before = near_states(optimizer)
        _, seen = measure_peak(update)
        one.finish()
    assert seen is not None
    assert seen.peak + resident_bytes(one.buffers) - (near_states(optimizer) - before) <= foreseen.total


def test_windows_keep_no_scalars(tmp_path: Path) -> None:
    """Memory does not grow with the number of updated parameters; none makes a state again."""
    ours = [nn.Parameter(tensor) for tensor in offload_tensors([torch.zeros(40_001) for _ in range(8)], tmp_path)]
    optimizer = OPTIMIZERS["AdamW"](ours)
    zeros = [torch.zeros(()).expand(parameter.shape) for parameter in ours]
    with torch.no_grad():
        first = relay(optimizer, ours, tmp_path)
        for parameter, gradient in zip(ours, zeros, strict=True):
            first.update(parameter, gradient)
        first.finish()
        foreseen = window_bytes(
            optimizer, WINDOW, OffloadedTensors(everywhere, everywhere, everywhere), ours, separate=True
        )[0]
        held, seen = measure_peak(lambda: _most_of_them(optimizer, ours, zeros, tmp_path))
        assert seen is not None
        assert resident_bytes(held.buffers) <= seen.net <= foreseen.between
        held.finish()


def _most_of_them(optimizer: Any, ours: list[nn.Parameter], zeros: list[Tensor], folder: Path) -> WindowedUpdate:
    one = relay(optimizer, ours, folder)
    for parameter, gradient in zip(ours[:-1], zeros, strict=False):
        one.update(parameter, gradient)
    return one


def near_states(optimizer: Any) -> int:
    return resident_bytes(tensor for tensor in state_tensors(optimizer) if buffer_slice_of(tensor) is None)


def test_a_gradient_that_the_update_only_reads_is_not_written_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and two states are, whole pages of them; the gradient is not, which lies in the same windows."""
    one = training(tmp_path, OPTIMIZERS["AdamW"], ALL).steps(2)
    one.gradients()
    updated = [parameter for parameter in one.parameters if parameter.grad is not None]
    with monkeypatch.context() as patch:
        gate = Gate(patch)
        gate.opened.set()
        one.optimizer.step()
        drain()
    assert 3 * sum(parameter.nbytes for parameter in updated) <= gate.written
    assert gate.written < 3.5 * sum(parameter.nbytes for parameter in updated)


def test_a_write_that_fails_late_is_raised_by_a_later_update_or_at_the_end(tmp_path: Path) -> None:
    ours = parameters(tmp_path)
    one = relay(OPTIMIZERS["SGD"](ours), ours, tmp_path, 1 << 20)
    with failing("pwritev"), torch.no_grad():
        one.update(ours[0], torch.ones(SHAPES[0]))
        with pytest.raises(SpillError, match="failed to write"):
            one.finish()
    drain()


@pytest.mark.long
@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("last", [1, 20])
def test_a_step_whose_last_writes_fail_does_not_end_well(last: int) -> None:
    """The last writes have not ended when the last update returns: backward raises what they met all the same."""
    twins = fused(kind="momentum", budget=smallest("momentum"))
    steps(twins, 2)
    model, optimizer = copy.deepcopy((twins.plain.state_dict(), twins.theirs.state_dict()))
    with failing("pwritev", here=False) as seen:
        steps(twins, 1)
    count = len(seen)
    made = twins.model(batch())
    with failing("pwritev", after=count - last), pytest.raises(memgraph.SpillError) as caught:
        made.backward()
    assert "of 12 parameters have been updated" in "".join(caught.value.__notes__)
    with pytest.raises(memgraph.FusedError, match="load_state"):
        twins.ours.step()
    twins.model.load_state_dict(model)
    twins.ours.load_state_dict(copy.deepcopy(optimizer))
    twins.plain.load_state_dict(model)
    twins.theirs.load_state_dict(copy.deepcopy(optimizer))
    steps(twins, 2)
    assert far(twins.module, twins.ours)


@pytest.mark.usefixtures("small_windows")
def test_an_error_elsewhere_in_backward_leaves_no_copy_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = fused(kind="momentum", budget=smallest("momentum"))
    steps(twins, 2)
    made, update, relays = twins.model(batch()), FusedUpdate._update, list[WindowedUpdate]()

    def stop(self: FusedUpdate, name: str, gradient: Tensor) -> None:
        update(self, name, gradient)
        if self.stream is not None:
            relays.append(self.stream)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FusedUpdate, "_update", stop)
        made.backward()
    (one,) = relays
    windows: list[Any] = [*one.filled.values(), *one.drained.values()]
    parts = [part for window in windows for move in window.copies for part in move.chunks]
    assert parts and all(part.is_set for part in parts)
    with pytest.raises(memgraph.FusedError):
        twins.model(batch())


def test_windows_stay_for_updates_in_backward_alone() -> None:
    trained = [nn.Parameter(torch.zeros(300, 300)) for _ in range(3)]
    optimizer = torch.optim.AdamW(trained)
    inside, behind = (OffloadedUpdate(optimizer, fused=fuse) for fuse in (True, False))
    assert 0 < inside.nbytes_between(trained) <= inside.peak_nbytes(trained)
    assert behind.nbytes_between(trained) == 0


@pytest.mark.usefixtures("small_windows")
def test_all_of_the_step_is_within_its_forecast_where_windows_stay() -> None:
    twins = fused(kind="momentum", budget=smallest("momentum"))
    twins.step(partial(_train, seed=0))
    report = twins.model.plan
    assert report.machine.streaming.update_staging and report.measured is not None
    assert report.measured <= report.peak <= report.budget


def _train(model: nn.Module, optimizer: Any, run: Any, seed: int) -> Tensor:
    made: Tensor = run(model, batch(seed))
    made.backward()
    optimizer.step()
    optimizer.zero_grad()
    return made.detach()
