"""Save a training and go on with it, in a file that plain PyTorch loads.

    memgraph.save_state("run.pt", model, optimizer)     # model, optimizer, random generators; whole or not at all
    memgraph.load_state("run.pt", model, optimizer)     # goes on bit for bit
    torch.load("run.pt", weights_only=True)["model"]    # the plain model's state_dict()

    memgraph.save_state("run.safetensors", model, optimizer)            # the same in the other format
    safetensors.torch.load_file("run.safetensors")["fc.weight"]         # the plain model's, and the rest beside it

What lives on disk passes through the page cache, and no full copy of it is ever in memory.  What was loaded is the
process's own: the file may be overwritten, cut short or removed.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn

from ..errors import StateError
from ..optim.validate_state import check_state_dict, class_name
from ..options.argument_rules import SAVE_RULES, check_argument
from ..oss import OSS
from ..storage.spill_file import SpillError, advice_for
from ..system.signals import Interrupts
from . import safetensors_file
from .atomic_file import regular_file, replace
from .checksums import refuse_damaged_archive
from .compiled_module import CompiledModule
from .loaded_state import LoadedState

FORMAT, SAFETENSORS = 1, ".safetensors"
HOOKS = "_optimizer_load_state_dict_pre_hooks"  # of torch's
Target = str | os.PathLike[str]


def save_state(path: Target, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write parameters, buffers, the optimizer's state, the random generators' and a compiled model's plans to `path`.

    A name that ends in .safetensors asks for that format, in which what is the model's has its own name, and all else
    one that begins with "memgraph."; every other name for that of `torch.save`.  The file has no name until it is
    complete and on disk: whatever happens meanwhile, `path` is the old file or the new one, and there is nothing beside
    it, even if the process is killed.

    Raises:
        TypeError: `path`, `model` or `optimizer` is something else.
        StateError: the folder does not take it: full, not there, not writable; or the format does not.
        ShardError: ranges of the parameters are on other ranks, since the last step has left the gathering to forward.
        FusedError: only some parameters are updated, since a backward with `fuse_update` has failed.
    """
    _refuse_others_than_wanted(path, model, optimizer)
    if isinstance(model, CompiledModule):
        model.refuse_torn()
    if isinstance(optimizer, OSS):
        optimizer.pending_gathers.refuse_reads(model.parameters(), "save_state")
    state = {
        "memgraph": FORMAT,
        "model": model.state_dict(),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "optimizer_class": None if optimizer is None else class_name(_kind(optimizer)),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "plans": _plans(model),
    }
    whole = Path(path).absolute()
    try:
        _write(state, whole)
    except OSError as error:
        reason = f"{whole} can't be written: {os.strerror(error.errno) if error.errno else error}"
        kept = "; the file of this name is as it was" if os.path.exists(whole) else ""
        raise StateError(f"{reason}{kept}; {advice_for(error, _way_out(error, whole))}") from error


def load_state(path: Target, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Bring model, optimizer and random generators to where they were when `path` was saved.

    All of the file is read and compared with its checksums first; then Ctrl-C waits until all of it is there.  Nothing
    that was loaded refers to the file any more.

    Raises:
        StateError: it is no training state, is damaged, or is one of another model or optimizer.  Nothing was changed.
        FileNotFoundError: there is no such file.
        SpillError: the disk has no room for the states of a compiled model that are to live there; neither.
        TypeError: `path`, `model` or `optimizer` is something else.
    """
    _refuse_others_than_wanted(path, model, optimizer)
    if isinstance(optimizer, OSS):
        optimizer.pending_gathers.gather()  # after a torn step, too
    _refuse_unreadable(path)
    state = _read(path)
    _refuse_unsound(path, state)
    _refuse_others(path, model.state_dict(), state["model"])
    if (optimizer is None) != (state["optimizer"] is None):
        has, wanted = ("no ", "one was given") if optimizer is not None else ("an ", "none was given")
        raise StateError(f"{path} has {has}optimizer's state, and {wanted}: load it as it was saved")
    _refuse_other_classes(path, state.get("optimizer_class"), optimizer)
    _refuse_other_states(path, state["optimizer"], optimizer)
    with Interrupts():
        _restore(path, state, model, optimizer)


def _kind(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class whose state it is: that of the optimizer in a wrapper."""
    if isinstance(optimizer, OSS):
        return optimizer.optimizer_class
    inner = getattr(optimizer, "optimizer", None)
    return _kind(inner) if isinstance(inner, torch.optim.Optimizer) else type(optimizer)


def _way_out(error: OSError, whole: Path) -> str:
    """What to do about a name that can't be written."""
    if error.errno == errno.ENAMETOOLONG:
        return "give a shorter name"
    if error.errno == errno.ENOENT:
        return f"there is no folder {whole.parent}: make it, or name another"
    if error.errno == errno.ENOTDIR:
        return f"{whole.parent} is no folder, or lies in none: name another"
    return "free some space, or name another folder"


def _plans(model: nn.Module) -> list[str]:
    """What `memgraph.compile(plan=...)` takes, so that with a `wire_dtype` the same values are rounded again."""
    return [step.report.to_json() for step in model._steps.values()] if isinstance(model, CompiledModule) else []


def _write(state: Mapping[str, Any], whole: Path) -> None:
    with Interrupts() as interrupts:

        def fill(name: str) -> None:
            if whole.suffix == SAFETENSORS:
                _put_tensors(state, name, whole, interrupts)
            else:
                _put(state, name, interrupts)

        replace(whole, fill, interrupts.check)


def _put_tensors(state: Mapping[str, Any], name: str, whole: Path, interrupts: Interrupts) -> None:
    try:
        safetensors_file.write(state, name, whole.parent, interrupts.check)
    except SpillError as error:
        raise StateError(f"{whole} can't be written: copies of what is not contiguous have no room: {error}") from error
    except (TypeError, LookupError, ValueError) as error:
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


def _refuse_unreadable(path: Target) -> None:
    """Refuse what is no regular file, or has nothing in it."""
    try:
        found = regular_file(path)
    except OSError as error:
        raise StateError(f"{path} can't be read: {error.strerror}; give a file of save_state") from error
    if found is not None and not found.st_size:
        raise StateError(f"{path} can't be read as a training state: it is empty; give a file of save_state")


def _read(path: Target) -> Any:
    """What a file says it is."""
    try:
        if Path(path).suffix == SAFETENSORS:
            return safetensors_file.read(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        refuse_damaged_archive(path, state)
        return state
    except FileNotFoundError as error:
        if os.path.exists(path):  # safetensors says so of whatever can't be opened
            raise StateError(f"{path} can't be opened; {_advice(path)}") from error
        raise
    except StateError as error:
        raise StateError(f"{path} is damaged: {error}; go on from an earlier one") from error
    except LookupError as error:
        raise StateError(f"{path} is no training state; give a file of save_state") from error
    except Exception as error:  # pickle, zipfile, torch and safetensors each have their own
        raise StateError(f"{path} can't be read as a training state: {_words(error)}; {_advice(path)}") from error


def _words(error: Exception) -> str:
    """Why a file can't be read; of what torch says, its remarks on other ways to load it are left out."""
    if found := re.search(r"GLOBAL (\S+) was not an allowed global", str(error)):
        return f"it has a pickled {found[1]} in it, and only tensors, numbers, texts and containers of them are read"
    if "mmap can only be used" in str(error):
        return "it is none of torch.save's archives"
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).partition("\n")[0]


def _advice(path: Target) -> str:
    """What to do about a file that can't be read: two files are open while one is."""
    files = []
    try:
        for _ in range(2):
            files.append(open(path, "rb"))  # noqa: SIM115
    except OSError as error:
        return advice_for(error, "see that it may be read, or give another file of save_state")
    finally:
        for file in files:
            file.close()
    return "give a file of save_state"


def _restore(path: Target, state: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    loading = LoadedState(model, optimizer, state)
    try:
        if optimizer is not None:
            optimizer.load_state_dict(loading.optimizer_state)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        loading.undo()
        raise StateError(f"{path} is of another optimizer: {error}; make one with the same groups") from error
    try:
        model.load_state_dict(loading.model_state)
    except BaseException:  # of a hook, or of a module's own way to load
        loading.undo()
        raise
    loading.keep()
    torch.set_rng_state(state["random"])
    if state["random_cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["random_cuda"])


def _refuse_unsound(path: Target, state: Any) -> None:
    """Refuse what this version of memgraph has not written, and random numbers of another torch."""
    kinds = {"model": Mapping, "optimizer": Mapping | NoneType, "random": Tensor, "random_cuda": list}
    known = isinstance(state, Mapping) and state.get("memgraph") == FORMAT
    if not known or not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
        raise StateError(f"{path} is no training state of this version of memgraph; give a file of save_state")
    _refuse_other_random_numbers(path, state["random"], state["random_cuda"])


def _refuse_other_random_numbers(path: Target, random: Tensor, random_cuda: list[Any]) -> None:
    """Try them on generators that are nobody's."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        torch.Generator().set_state(random)
        if count and random_cuda:
            for place, each in enumerate(random_cuda):
                torch.Generator(f"cuda:{place}").set_state(each)
    except (RuntimeError, TypeError) as error:
        raise StateError(
            f"{path} has the random generators of another torch, or of other devices: {error}; load its model and "
            "optimizer by themselves"
        ) from error


def _refuse_other_classes(path: Target, saved: object, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse the state of another class, which an older file does not name; hooks may make of it what they want."""
    if optimizer is None or saved is None or getattr(optimizer, HOOKS, None):
        return
    if saved != (own := class_name(_kind(optimizer))):
        raise StateError(
            f"{path} is of another optimizer: it is {saved}'s, and {own} was given; make the same optimizer"
        )


def _refuse_other_states(path: Target, state: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse another optimizer, but for those that look for themselves, or whose hooks make of a state what they
    want."""
    if optimizer is None or isinstance(optimizer, OSS) or getattr(optimizer, HOOKS, None):
        return
    try:
        check_state_dict(optimizer, state)
    except StateError as error:
        raise StateError(f"{path} is of another optimizer: {error}; make the same optimizer") from error


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
    if not isinstance(value, Tensor):
        return "no tensor"
    layout = "" if value.layout == torch.strided else f" {value.layout}"
    return f"{value.dtype} {tuple(value.shape)}{layout}"


def _refuse_others_than_wanted(path: object, model: object, optimizer: object) -> None:
    """
    Raises:
        TypeError, ValueError: an argument is of another kind.
    """
    for name, value in {"path": path, "model": model, "optimizer": optimizer}.items():
        check_argument(name, value, SAVE_RULES)
