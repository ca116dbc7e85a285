"""An update in windows that the disk or Ctrl-C interrupts resumes where it was, and leaves nothing behind."""

from __future__ import annotations

import copy
import errno
import gc
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memgraph.storage import io_threads
from memgraph.storage.spill_file import SpillError
from tests.support.windowed_training import (
    ALL,
    OPTIMIZERS,
    SIDES,
    Make,
    Training,
    assert_equal,
    training,
)


class Faulty:
    """Stands in for `workers.transfer`: does something at one call, or from it on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, lasting: bool, fault: Callable[[], None]) -> None:
        self.at, self.lasting, self.fault, self.calls = at, lasting, fault, 0
        self.transfer = io_threads.transfer_pages
        monkeypatch.setattr(io_threads, "transfer_pages", self)

    def __call__(self, *where: Any) -> None:
        self.calls += 1
        if self.calls == self.at or (self.lasting and self.calls > self.at):
            self.fault()
        self.transfer(*where)


def broken() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def transfers(tmp_path: Path, make: Make, first: bool) -> int:
    with pytest.MonkeyPatch.context() as patch:
        one = training(tmp_path, make, ALL).steps(0 if first else 1)
        one.gradients()
        faulty = Faulty(patch, 0, False, broken)
        one.optimizer.step()
        return faulty.calls


@pytest.mark.long
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "NAdam", "AdamW fused"])
def test_an_update_resumes_where_the_disk_failed(tmp_path: Path, name: str, first: bool, lasting: bool) -> None:
    make = OPTIMIZERS[name]
    plain = training(tmp_path, make, None).steps(3)
    begin = 1 + 6 * lasting + 3 * first  # each tries other places
    for at in range(begin, transfers(tmp_path, make, first) + 1, 17):
        one, calls = training(tmp_path, make, ALL), list[str]()
        one.steps(0 if first else 1)
        one.optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("pre"))
        one.optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("post"))
        one.gradients()
        with pytest.MonkeyPatch.context() as patch:
            Faulty(patch, at, lasting, broken)
            for _ in range(2 if lasting else 1):
                with pytest.raises(SpillError, match=r"Input/output error.*windows of this update are done: call step"):
                    one.optimizer.step()
        one.optimizer.step()
        assert calls == ["pre", "post"]
        assert_equal(one.steps(2 if first else 1), plain)


def test_the_loss_of_an_interrupted_update_is_returned_at_its_end(tmp_path: Path) -> None:
    one, calls = training(tmp_path, OPTIMIZERS["AdamW"], ALL), []

    def closure() -> float:
        calls.append(True)
        one.gradients()
        return 3.5

    with pytest.MonkeyPatch.context() as patch:
        faulty = Faulty(patch, 0, False, broken)
        original = one.gradients

        def gradients() -> None:
            original()
            faulty.at = faulty.calls + 50

        patch.setattr(one, "gradients", gradients)
        with pytest.raises(SpillError):
            one.optimizer.step(closure)
    assert one.optimizer.step(closure) == 3.5
    assert calls == [True]
    assert_equal(one, training(tmp_path, OPTIMIZERS["AdamW"], None).steps(1))


@pytest.mark.long
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_an_update_resumes_after_ctrl_c(tmp_path: Path, first: bool) -> None:
    plain = training(tmp_path, OPTIMIZERS["AdamW"], None).steps(3)
    handler, went_on = signal.getsignal(signal.SIGINT), 0
    for at in range(1, transfers(tmp_path, OPTIMIZERS["AdamW"], first) + 1, 7):
        one = training(tmp_path, OPTIMIZERS["AdamW"], ALL).steps(0 if first else 1)
        one.gradients()
        with pytest.MonkeyPatch.context() as patch:
            Faulty(patch, at, False, lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt) as caught:
                one.optimizer.step()
                while True:  # the signal is delivered when it is
                    pass
        assert one.windowed is not None
        notes = " ".join(getattr(caught.value, "__notes__", ()))
        assert ("windows of this update are done: call step() again" in notes) == (one.windowed.pending is not None)
        if one.windowed.pending:
            went_on += 1
            one.optimizer.step()
        assert_equal(one.steps(2 if first else 1), plain)
    assert went_on and signal.getsignal(signal.SIGINT) is handler


def interrupted(folder: Path) -> Training:
    one = training(folder, OPTIMIZERS["AdamW"], ALL).steps(2)
    one.gradients()
    with pytest.MonkeyPatch.context() as patch:
        Faulty(patch, 60, True, broken)
        with pytest.raises(SpillError):
            one.optimizer.step()
    assert one.windowed is not None and one.windowed.pending is not None
    return one


def test_loading_an_earlier_state_gives_an_interrupted_update_up(tmp_path: Path) -> None:
    plain = training(tmp_path, OPTIMIZERS["AdamW"], None).steps(1)
    kept = copy.deepcopy((plain.parameters, plain.optimizer.state_dict()))
    one = interrupted(tmp_path)
    with torch.no_grad():
        for p, q in zip(one.parameters, kept[0], strict=True):
            p.copy_(q)
    one.optimizer.load_state_dict(kept[1])
    one.done = plain.done
    assert_equal(one.steps(3), plain.steps(3))


@pytest.mark.parametrize("way", ["new", "scaled", "none"])
def test_other_gradients_do_not_finish_an_interrupted_update(tmp_path: Path, way: str) -> None:
    one = interrupted(tmp_path)
    before = [p.detach().clone() for p in one.parameters]
    if way == "new":
        one.gradients()
    elif way == "scaled":
        assert one.parameters[0].grad is not None
        one.parameters[0].grad.mul_(2)
    else:
        one.optimizer.zero_grad()
    with pytest.raises(SpillError, match="the gradients that the others need have been changed; load an earlier state"):
        one.optimizer.step()
    assert all(map(torch.equal, before, one.parameters))


def test_a_disk_without_space_for_states_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = training(tmp_path, OPTIMIZERS["AdamW"], ALL)
    one.gradients()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(SpillError, match=r"cannot make a file of .* bytes for the state"):
            one.optimizer.step()
    assert not one.optimizer.state
    one.optimizer.step()
    assert_equal(one, training(tmp_path, OPTIMIZERS["AdamW"], None).steps(1))


def test_nothing_of_an_update_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memgraph.optim import windowed_optimizer, windowed_update

    updates: list[weakref.ref[Any]] = []

    class Watched(windowed_update.WindowedUpdate):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            updates.extend(map(weakref.ref, (self, *self.buffers)))

    monkeypatch.setattr(windowed_optimizer, "WindowedUpdate", Watched)
    one = training(tmp_path, OPTIMIZERS["AdamW"], SIDES["states"]).steps(1)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    one.gradients()
    with pytest.MonkeyPatch.context() as patch:
        Faulty(patch, 10, True, broken)
        with pytest.raises(SpillError):
            one.optimizer.step()
    one.optimizer.step()
    gc.collect()
    assert len(updates) >= 4 and not any(ref() is not None for ref in updates)
    assert len(os.listdir("/proc/self/fd")) == before
