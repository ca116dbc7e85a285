"""Save a training and go on with it, in a file that plain PyTorch loads.

    memgraph.save_state("run.pt", model, optimizer)     # model, optimizer, random generators; whole or not at all
    memgraph.load_state("run.pt", model, optimizer)     # goes on bit for bit
    torch.load("run.pt", weights_only=True)["model"]    # the plain model's state_dict()

    memgraph.save_state("run.safetensors", model, optimizer)            # the same in the other format
    safetensors.torch.load_file("run.safetensors")["fc.weight"]         # the plain model's, and the rest beside it

What lives on disk passes through the page cache, and no full copy of it is ever in memory.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn

from . import tensor_file
from .errors import StateError
from .interrupts import Interrupts
from .module import CompiledModule
from .oss import OSS
from .spill import SpillError

FORMAT, SAFETENSORS = 1, ".safetensors"
Target = str | os.PathLike[str]


def save_state(path: Target, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write parameters, buffers, the optimizer's state, the random generators' and a compiled model's plans to `path`.

    A name that ends in .safetensors asks for that format, in which what is the model's has its own name, and all else
    one that begins with "memgraph."; every other name for that of `torch.save`.  The file is written beside it, brought
    to disk, and then takes its name: whatever happens meanwhile, `path` is the old file or the new one; Ctrl-C leaves
    nothing beside it.

    Raises:
        StateError: the folder does not take it: full, not there, not writable; or the format does not.
        ShardError: ranges of the parameters are on other ranks, since the last step has left the gathering to forward.
        FusedError: only some parameters are updated, since a backward with `fuse_update` has failed.
    """
    if isinstance(model, CompiledModule):
        model.refuse_torn()
    if isinstance(optimizer, OSS):
        optimizer.awaited.refuse(model.parameters(), "save_state")
    state = {
        "memgraph": FORMAT,
        "model": model.state_dict(),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "plans": _plans(model),
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

    Ctrl-C waits until all of it is there.

    Raises:
        StateError: it is no training state, or one of another model or optimizer.  Nothing was changed.
        FileNotFoundError: there is no such file.
    """
    if isinstance(optimizer, OSS):
        optimizer.awaited.gather()  # after a torn step, too
    state = _read(path)
    _refuse_unsound(path, state)
    _refuse_others(path, model.state_dict(), state["model"])
    if (optimizer is None) != (state["optimizer"] is None):
        has, wanted = ("no ", "one was given") if optimizer is not None else ("an ", "none was given")
        raise StateError(f"{path} has {has}optimizer's state, and {wanted}: load it as it was saved")
    with Interrupts():
        _restore(path, state, model, optimizer)


def _plans(model: nn.Module) -> list[str]:
    """What `memgraph.compile(plan=...)` takes, so that with a `wire_dtype` the same values are rounded again."""
    return [step.report.to_json() for step in model._steps.values()] if isinstance(model, CompiledModule) else []


def _write(state: Mapping[str, Any], whole: Path) -> None:
    """Write a file beside it, and let that take its name."""
    with Interrupts() as interrupts:
        handle, name = tempfile.mkstemp(prefix=f".{whole.name}.", dir=whole.parent)
        os.close(handle)
        try:
            if whole.suffix == SAFETENSORS:
                _put_tensors(state, name, whole)
            else:
                _put(state, name, interrupts)
            with open(name, "rb") as file:
                os.fsync(file.fileno())
            interrupts.check()
            os.replace(name, whole)
            _sync(whole.parent)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise


def _put_tensors(state: Mapping[str, Any], name: str, whole: Path) -> None:
    try:
        tensor_file.write(state, name, whole.parent)
    except (SpillError, TypeError, LookupError, ValueError) as error:
        raise StateError(f"{whole} can't be written: {error}; name it .pt, which takes all that torch does") from error


def _put(state: Mapping[str, Any], name: str, interrupts: Interrupts) -> None:
    with open(name, "wb") as file:
        sink = _Sink(file, interrupts)
        try:
            torch.save(state, cast(BinaryIO, sink))  # which writes, and no more
        except RuntimeError as error:  # torch's own words for a write that failed, which do not say why
            if sink.error is None:
                raise
            raise sink.error from error


class _Sink:
    """A file that remembers why it could not be written; Ctrl-C is a reason too."""

    def __init__(self, file: BinaryIO, interrupts: Interrupts) -> None:
        self.file, self.interrupts = file, interrupts
        self.error: BaseException | None = None

    def write(self, given: bytes) -> int:
        try:
            self.interrupts.check()
            return self.file.write(given)
        except BaseException as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _read(path: Target) -> Any:
    """What a file says it is."""
    try:
        if Path(path).suffix == SAFETENSORS:
            return tensor_file.read(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise
    except LookupError as error:
        raise StateError(f"{path} is no training state; give a file of save_state") from error
    except Exception as error:  # pickle, zipfile, torch and safetensors each have their own
        raise StateError(f"{path} can't be read as a training state: {error}; give a file of save_state") from error


def _restore(path: Target, state: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None:
        try:
            optimizer.load_state_dict(state["optimizer"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StateError(f"{path} is of another optimizer: {error}; make one with the same groups") from error
    model.load_state_dict(state["model"])
    torch.set_rng_state(state["random"])
    if state["random_cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["random_cuda"])


def _refuse_unsound(path: Target, state: Any) -> None:
    """Refuse what this version of memgraph has not written, and random numbers of another torch."""
    kinds = {"model": Mapping, "optimizer": Mapping | NoneType, "random": Tensor, "random_cuda": list}
    known = isinstance(state, Mapping) and state.get("memgraph") == FORMAT
    if not known or not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
        raise StateError(f"{path} is no training state of this version of memgraph; give a file of save_state")
    here = torch.get_rng_state()
    if (state["random"].dtype, state["random"].shape) != (here.dtype, here.shape):
        raise StateError(f"{path} has random generators of another torch; load its model and optimizer by themselves")


def _refuse_others(path: Target, there: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse another model before anything is changed."""
    if strange := sorted(set(there) ^ set(saved)):
        raise StateError(f"{path} is of another model: {strange[0]!r} is only in one of them; make the same model")
    for name, tensor in there.items():
        found, wanted = _look(saved[name]), _look(tensor)
        if found != wanted:
            raise StateError(
                f"{path} is of another model: {name!r} is {found} in the file and {wanted} in the model; make the same "
                "model"
            )


def _look(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else "no tensor"


def _sync(folder: Path) -> None:
    """Bring the new name to disk, where a folder can be opened."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
