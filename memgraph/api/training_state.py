"""Save a training and go on with it, in a file that plain PyTorch loads.

    memgraph.save_state("run.pt", model, optimizer)     # model, optimizer, random generators; whole or not at all
    memgraph.load_state("run.pt", model, optimizer)     # training continues bit for bit
    torch.load("run.pt", weights_only=True)["model"]    # the plain model's state_dict()

    memgraph.save_state("run.safetensors", model, optimizer)            # the same in the other format
    safetensors.torch.load_file("run.safetensors")["fc.weight"]         # the plain model's, beside everything else

State on disk passes through the page cache, and memory never holds a full copy of it.  Loaded tensors do not refer to
the file: it may be overwritten, truncated or removed.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, cast

import numpy as np
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
HOOKS = "_optimizer_load_state_dict_pre_hooks"  # torch's attribute
Target = str | os.PathLike[str]


def save_state(path: Target, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write parameters, buffers, the optimizer's state, the random generators' and a compiled model's plans to `path`.

    A name that ends in .safetensors selects that format: the model's tensors have their own names, and everything else
    a name that begins with "memgraph.".  Every other name selects the format of `torch.save`.  The file gets its name
    when it is complete and on disk: even if the process is killed, `path` is the old file or the new one, and no other
    file is left.

    Raises:
        TypeError: `path`, `model` or `optimizer` has another type.
        StateError: the file can't be written: no room, no folder, no permission, or a value that the format excludes.
        ShardError: shards of the parameters are on other ranks, since the last step left gathering to forward.
        FusedError: only some parameters are updated, since a backward with `fuse_update` failed.
    """
    _check_types(path, model, optimizer)
    if isinstance(model, CompiledModule):
        model.refuse_partial_update()
    if isinstance(optimizer, OSS):
        optimizer.pending_gathers.refuse_reads(model.parameters(), "save_state")
    state = {
        "memgraph": FORMAT,
        "model": model.state_dict(),
        "optimizer": None if optimizer is None else with_python_numbers(optimizer.state_dict()),
        "optimizer_class": None if optimizer is None else class_name(kind_of(optimizer)),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "plans": _plans(model),
    }
    file = Path(path).absolute()
    try:
        _write(state, file)
    except OSError as error:
        reason = f"{file} can't be written: {os.strerror(error.errno) if error.errno else error}"
        kept = "; the file of this name is unchanged" if os.path.exists(file) else ""
        raise StateError(f"{reason}{kept}; {advice_for(error, _write_advice(error, file))}") from error


def load_state(path: Target, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load model, optimizer and random generators from a file of `save_state`.

    The whole file is read and compared with its checksums first; then Ctrl-C waits until everything is loaded.  Loaded
    tensors do not refer to the file.

    Raises:
        StateError: the file is no training state, is damaged, or is of another model or optimizer.  Nothing has
            changed.
        FileNotFoundError: there is no such file.
        SpillError: the disk has no room for offloaded states of a compiled model.  Nothing has changed.
        TypeError: `path`, `model` or `optimizer` has another type.
    """
    _check_types(path, model, optimizer)
    if isinstance(optimizer, OSS):
        optimizer.pending_gathers.gather()  # also after a step that failed half way
    _refuse_unreadable(path)
    state = _read(path)
    _refuse_other_formats(path, state)
    _refuse_other_models(path, model.state_dict(), state["model"])
    if (optimizer is None) != (state.get("optimizer") is None):
        has, wanted = ("no ", "one was given") if optimizer is not None else ("an ", "none was given")
        raise StateError(f"{path} has {has}optimizer's state, and {wanted}: load it as it was saved")
    _refuse_other_classes(path, state.get("optimizer_class"), optimizer)
    if optimizer is not None:
        state = {**state, "optimizer": converted(optimizer, state["optimizer"])}
        _refuse_other_states(path, state["optimizer"], optimizer)
    with Interrupts():
        _restore(path, state, model, optimizer)


def with_python_numbers(value: Any) -> Any:
    """Return the state of an optimizer, numbers of numpy as Python's: `weights_only` reads no others."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: with_python_numbers(part) for key, part in value.items()}
    return type(value)(map(with_python_numbers, value)) if type(value) in (list, tuple) else value


def kind_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer, or of the one that it wraps."""
    if isinstance(optimizer, OSS):
        return optimizer.optimizer_class
    inner = getattr(optimizer, "optimizer", None)
    return kind_of(inner) if isinstance(inner, torch.optim.Optimizer) else type(optimizer)


def _write_advice(error: OSError, file: Path) -> str:
    """Return what to do about a file that can't be written."""
    if error.errno == errno.ENAMETOOLONG:
        return "give a shorter name"
    if error.errno == errno.ENOENT:
        return f"there is no folder {file.parent}: make it, or name another"
    if error.errno == errno.ENOTDIR:
        return f"{file.parent} is no folder, or is in none: name another"
    return "free some space, or name another folder"


def _plans(model: nn.Module) -> list[str]:
    """Return the plans for `memgraph.compile(plan=...)`, so that with a `wire_dtype` the same values are rounded."""
    return [step.report.to_json() for step in model._kept.steps] if isinstance(model, CompiledModule) else []


def _write(state: Mapping[str, Any], file: Path) -> None:
    with Interrupts() as interrupts:

        def fill(name: str) -> None:
            if file.suffix == SAFETENSORS:
                _write_safetensors(state, name, file, interrupts)
            else:
                _write_archive(state, name, file, interrupts)

        replace(file, fill, interrupts.check)


def _write_safetensors(state: Mapping[str, Any], name: str, file: Path, interrupts: Interrupts) -> None:
    try:
        safetensors_file.write(state, name, file.parent, interrupts.check)
    except SpillError as error:
        raise StateError(f"{file} can't be written: no room for copies of non-contiguous tensors: {error}") from error
    except (TypeError, LookupError, ValueError) as error:
        raise StateError(f"{file} can't be written: {error}; name it .pt, which takes all that torch does") from error


def _write_archive(state: Mapping[str, Any], name: str, path: Path, interrupts: Interrupts) -> None:
    with open(name, "wb") as file:
        sink = _Sink(file, interrupts)
        try:
            torch.save(state, cast(BinaryIO, sink))  # torch.save only writes
        except RuntimeError as error:  # torch's error for a failed write does not say why
            if sink.error is None:
                raise
            raise sink.error from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise StateError(f"{path} can't be written: {error}; leave that out of the state") from error
    try:
        torch.load(name, map_location="cpu", weights_only=True, mmap=True)  # reads no tensor
    except pickle.UnpicklingError as error:
        raise StateError(f"{path} can't be written so that it can be read: {_reason(error)}") from error


class _Sink:
    """A file that keeps the error of a failed write; Ctrl-C is one too."""

    def __init__(self, file: BinaryIO, interrupts: Interrupts) -> None:
        self.file, self.interrupts = file, interrupts
        self.error: BaseException | None = None

    def write(self, data: bytes) -> int:
        try:
            self.interrupts.check()
            return self.file.write(data)
        except BaseException as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _refuse_unreadable(path: Target) -> None:
    """Refuse a file that is not regular, or is empty."""
    try:
        status = regular_file(path)
    except OSError as error:
        raise StateError(f"{path} can't be read: {error.strerror}; give a file of save_state") from error
    if status is not None and not status.st_size:
        raise StateError(f"{path} can't be read as a training state: it is empty; give a file of save_state")


def _read(path: Target) -> Any:
    try:
        if Path(path).suffix == SAFETENSORS:
            return safetensors_file.read(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        refuse_damaged_archive(path, state)
        return state
    except FileNotFoundError as error:
        if os.path.exists(path):  # safetensors raises it for every file that it can't open
            raise StateError(f"{path} can't be opened; {_read_advice(path)}") from error
        raise
    except StateError as error:
        raise StateError(f"{path} is damaged: {error}; continue from an earlier one") from error
    except LookupError as error:
        raise StateError(f"{path} is no training state; give a file of save_state") from error
    except Exception as error:  # pickle, zipfile, torch and safetensors have errors of their own
        raise StateError(f"{path} can't be read as a training state: {_reason(error)}; {_read_advice(path)}") from error


def _reason(error: Exception) -> str:
    """Return why a file can't be read, without torch's remarks on other ways to load it."""
    if match := re.search(r"GLOBAL (\S+) was not an allowed global", str(error)):
        return f"it has a pickled {match[1]} in it, and only tensors, numbers, texts and containers of them are read"
    if "mmap can only be used" in str(error):
        return "it is no archive of torch.save"
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).partition("\n")[0]


def _read_advice(path: Target) -> str:
    """Return what to do about a file that can't be read; reading it takes two open files."""
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
            with without_hooks(optimizer):
                optimizer.load_state_dict(loading.optimizer_state)
        model.load_state_dict(loading.model_state)
    except BaseException as error:  # raised by the user's own class or hook
        loading.undo()
        if isinstance(error, ValueError | LookupError | TypeError | AttributeError | RuntimeError):
            raise StateError(f"{path} is of another model or optimizer: {error}; nothing was changed") from error
        raise
    loading.keep()
    torch.set_rng_state(state["random"])
    if state["random_cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["random_cuda"])


def _refuse_other_formats(path: Target, state: Any) -> None:
    """Refuse a state that this version of memgraph has not written, or random generators of another torch."""
    kinds = {"model": Mapping, "optimizer": Mapping | NoneType, "random": Tensor, "random_cuda": list}
    has_format = isinstance(state, Mapping) and state.get("memgraph") == FORMAT
    if not has_format or not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
        raise StateError(
            f"{path} is no training state of this version of memgraph; give a file of save_state, or load a state_dict "
            "with model.load_state_dict(torch.load(path))"
        )
    _refuse_other_random_numbers(path, state["random"], state["random_cuda"])


def _refuse_other_random_numbers(path: Target, random: Tensor, random_cuda: list[Any]) -> None:
    """Try the states on new generators."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        torch.Generator().set_state(random)
        if count and random_cuda:
            for place, each in enumerate(random_cuda):
                torch.Generator(f"cuda:{place}").set_state(each)
    except (RuntimeError, TypeError) as error:
        raise StateError(
            f"{path} has random generators of another torch, or of other devices: {error}; load its model and "
            "optimizer separately"
        ) from error


def _refuse_other_classes(path: Target, saved: object, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse the state of another class, if the file names it; an optimizer with hooks may convert the state."""
    if optimizer is None or saved is None or getattr(optimizer, HOOKS, None):
        return
    if saved != (own := class_name(kind_of(optimizer))):
        raise StateError(
            f"{path} is of another optimizer: it is {saved}'s, and {own} was given; make the same optimizer"
        )


def converted(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state as the optimizer's hooks make it, which run here and not again."""
    state = dict(state)
    for hook in getattr(optimizer, HOOKS, {}).values():
        made = hook(optimizer, state)
        state = state if made is None else made
    return state


@contextmanager
def without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    hooks = getattr(optimizer, HOOKS, None)
    if not hooks:
        yield
        return
    kept = dict(hooks)
    hooks.clear()
    try:
        yield
    finally:
        hooks.update(kept)


def _refuse_other_states(path: Target, state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse the state of another optimizer, unless the optimizer checks it itself."""
    if isinstance(optimizer, OSS):
        return
    try:
        check_state_dict(optimizer, state)
    except StateError as error:
        raise StateError(f"{path} is of another optimizer: {error}; make the same optimizer") from error


def _refuse_other_models(path: Target, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse the state of another model before anything is changed."""
    if different := sorted(set(current) ^ set(saved)):
        raise StateError(f"{path} is of another model: {different[0]!r} is only in one of them; make the same model")
    for name, tensor in current.items():
        in_file, in_model = _described(saved[name]), _described(tensor)
        if in_file != in_model:
            raise StateError(
                f"{path} is of another model: {name!r} is {in_file} in the file and {in_model} in the model; make the "
                "same model"
            )


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return "no tensor"
    layout = "" if value.layout == torch.strided else f" {value.layout}"
    where = " on the meta device" if value.is_meta else ""
    return f"{value.dtype} {tuple(value.shape)}{layout}{where}"


def _check_types(path: object, model: object, optimizer: object) -> None:
    """
    Raises:
        TypeError, ValueError: an argument has another type or value.
    """
    for name, value in {"path": path, "model": model, "optimizer": optimizer}.items():
        check_argument(name, value, SAVE_RULES)
