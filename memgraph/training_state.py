"""Save a training and go on with it, in a file that plain PyTorch loads.

    memgraph.save_state("run.pt", model, optimizer)     # model, optimizer, random generators; whole or not at all
    memgraph.load_state("run.pt", model, optimizer)     # goes on bit for bit
    torch.load("run.pt", weights_only=True)["model"]    # the plain model's state_dict()

What lives on disk passes through the page cache, and no full copy of it is ever in memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import MemgraphError

FORMAT = 1
Target = str | os.PathLike[str]


class StateError(MemgraphError, ValueError):
    """A file that is no training state, or one of another model or optimizer; nothing was loaded."""


def save_state(path: Target, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write parameters, buffers, the optimizer's state and the random generators' to `path`.

    The file is written beside it, brought to disk, and then takes its name: whatever happens meanwhile, `path` is the
    old file or the new one.

    Raises:
        OSError: the folder does not take it.
    """
    state = {
        "memgraph": FORMAT,
        "model": model.state_dict(),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    whole = Path(path).absolute()
    handle, name = tempfile.mkstemp(prefix=f".{whole.name}.", dir=whole.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, whole)
        _sync(whole.parent)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


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
