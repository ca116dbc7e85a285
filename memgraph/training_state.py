"""Save a training and go on with it, in a file that plain PyTorch loads.

    memgraph.save_state("run.pt", model, optimizer)     # model, optimizer, random generators; whole or not at all
    memgraph.load_state("run.pt", model, optimizer)     # goes on bit for bit
    torch.load("run.pt", weights_only=True)["model"]    # the plain model's state_dict()

What lives on disk passes through the page cache, and no full copy of it is ever in memory.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import nn

from .errors import MemgraphError
from .module import CompiledModule

FORMAT = 1
Target = str | os.PathLike[str]


class StateError(MemgraphError, ValueError):
    """A file that is no training state, or one of another model or optimizer; nothing was loaded."""


def save_state(path: Target, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write parameters, buffers, the optimizer's state and the random generators' to `path`.

    The file is written beside it, brought to disk, and then takes its name: whatever happens meanwhile, `path` is the
    old file or the new one.

    Raises:
        StateError: the folder does not take it: full, not there, not writable; or the name is that of another format.
        FusedError: only some parameters are updated, since a backward with `fuse_update` has failed.
    """
    if isinstance(model, CompiledModule):
        model.refuse_torn()
    if Path(path).suffix == ".safetensors":
        raise StateError(
            f"{path} would not be what its name says, because a training state is written in torch's own format: "
            "name it .pt; for the parameters alone there is safetensors.torch.save_model"
        )
    state = {
        "memgraph": FORMAT,
        "model": model.state_dict(),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    whole = Path(path).absolute()
    try:
        _write(state, whole)
    except OSError as error:
        reason = f"{whole} can't be written: {os.strerror(error.errno) if error.errno else error}"
        kept = "; the file of this name is as it was" if whole.exists() else ""
        advice = "raise the limit (ulimit -f)" if error.errno == errno.EFBIG else "name a folder that takes it"
        raise StateError(f"{reason}{kept}; free some space, or {advice}") from error


def load_state(path: Target, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Bring model, optimizer and random generators to where they were when `path` was saved.

    Raises:
        StateError: it is no training state, or one of another model or optimizer.  Nothing was changed.
        FileNotFoundError: there is no such file.
    """
    state = _read(path)
    _compare(path, model.state_dict(), state["model"])
    if (optimizer is None) != (state["optimizer"] is None):
        has, wanted = ("no ", "one was given") if optimizer is not None else ("an ", "none was given")
        raise StateError(f"{path} has {has}optimizer's state, and {wanted}: load it as it was saved")
    if optimizer is not None:
        try:
            optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise StateError(f"{path} is of another optimizer: {error}; make one with the same groups") from error
    model.load_state_dict(state["model"])
    torch.set_rng_state(state["random"])
    if state["random_cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["random_cuda"])


def _write(state: Mapping[str, Any], whole: Path) -> None:
    """Write a file beside it, and let that take its name."""
    handle, name = tempfile.mkstemp(prefix=f".{whole.name}.", dir=whole.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            _put(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, whole)
        _sync(whole.parent)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _put(state: Mapping[str, Any], file: BinaryIO) -> None:
    sink = _Sink(file)
    try:
        torch.save(state, cast(BinaryIO, sink))  # which writes, and no more
    except RuntimeError as error:  # torch's own words for a write that failed, which do not say why
        if sink.error is None:
            raise
        raise sink.error from error


class _Sink:
    """A file that remembers why it could not be written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, given: bytes) -> int:
        try:
            return self.file.write(given)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _read(path: Target) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # pickle, zipfile and torch each have their own
        raise StateError(f"{path} can't be read as a training state: {error}; give a file of save_state") from error
    if not isinstance(state, dict) or state.get("memgraph") != FORMAT:
        raise StateError(f"{path} is no training state of this version of memgraph; give a file of save_state")
    return state


def _compare(path: Target, there: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse another model before anything is changed."""
    if strange := sorted(set(there) ^ set(saved)):
        raise StateError(f"{path} is of another model: {strange[0]!r} is only in one of them; make the same model")
    for name, tensor in there.items():
        found = saved[name]
        if isinstance(tensor, torch.Tensor) and tensor.shape != found.shape:
            shapes = f"{tuple(found.shape)} in the file and {tuple(tensor.shape)} in the model"
            raise StateError(f"{path} is of another model: {name!r} is {shapes}; make the same model")


def _sync(folder: Path) -> None:
    """Bring the new name to disk, where a folder can be opened."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
