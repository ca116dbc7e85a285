"""Save a sharded training to a folder of torch.distributed.checkpoint, which is replaced whole or not at all.

    memgraph.save_sharded("run", model, optimizer)     # on all ranks: each writes its part
    memgraph.load_sharded("run", model, optimizer)     # on any number of ranks; training goes on bit for bit

    model.*, optimizer.state.0.exp_avg, ..., optimizer.param_groups.0.lr     # names in the checkpoint

A new folder is written beside the old one and synced to disk, and then takes its name.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..errors import CollectiveError, MemgraphError, ShardError, StateError
from ..optim.validate_state import class_name
from ..options.argument_rules import SAVE_SHARDED_RULES, check_argument
from ..storage.spill_file import advice_for, sync_folder
from .checkpoint.own_state import OwnState
from .checkpoint.safe_reader import METADATA, Planner, Reader, note_checksums, refuse_damaged
from .checkpoint.sharded_state import empty_dtensor
from .comm.agreement import check_agreement, report_errors
from .comm.rank_group import all_failures
from .comm.watchdog import shared_watchdog
from .optimizer import OSS

Target = str | os.PathLike[str]
T = TypeVar("T")
ARGUMENTS, ADVICE = "the arguments", "Give the same on all ranks"
CLASS = "optimizer_class"  # key of its name; older folders have none
ELSEWHERE = object()  # an entry that only other ranks read
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants of Linux


def save_sharded(folder: Target, model: nn.Module, optimizer: OSS) -> None:
    """Write parameters, buffers, the optimizer's state and each rank's random generators to `folder`.

    Every rank of the optimizer's group has to call it, with the same folder, which they share. Whatever happens
    meanwhile, `folder` is the old one or the new one.

    Raises:
        StateError: it can't be written; says on which rank, and why.
        TypeError, ValueError, ShardError: an argument is wrong; on that rank, and nothing was written.
        AgreementError: ranks were given different folders, or another rank a wrong argument.
        CollectiveError: a rank is gone.
    """
    path = _check_arguments(folder, model, optimizer)
    optimizer.pending_gathers.gather()
    rank, name = optimizer.watchdog.group.rank(), f"saving of {path}"
    new, first = _beside(path, "new"), rank == 0
    model_state = _on_all_ranks(optimizer, name, model.state_dict)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer.sharded_state_dict()}
    state |= {"random": {str(rank): _random_state()}, CLASS: class_name(optimizer.optimizer_class)}
    _on_all_ranks(optimizer, name, lambda: _clear(new, path) if first else None)
    try:
        _on_all_ranks(optimizer, name, lambda: _write(optimizer, state, new))
        _on_all_ranks(optimizer, name, lambda: note_checksums(new, rank))
        _on_all_ranks(optimizer, name, lambda: _replace(new, path) if first else None)
    except StateError:
        if first:
            shutil.rmtree(new, ignore_errors=True)
        raise


def load_sharded(folder: Target, model: nn.Module, optimizer: OSS) -> None:
    """Load model, optimizer and random generators from a folder of `save_sharded`, on any number of ranks.

    Every rank of the optimizer's group has to call it. A rank that the saved training did not have keeps its random
    numbers. The folder is compared with its checksums first, a part of it on each rank.

    Raises:
        StateError: it can't be read, or is of another model or optimizer. Nothing was changed, unless it says so.
        TypeError, ValueError, ShardError: an argument is wrong; on that rank, and nothing was changed.
        AgreementError: ranks were given different folders, or another rank a wrong argument.
        CollectiveError: a rank is gone.
    """
    path = _check_arguments(folder, model, optimizer)
    rank, name = optimizer.watchdog.group.rank(), f"loading of {path}"
    optimizer.pending_gathers.gather()  # also after a step that has failed halfway
    if _is_between_names(path):
        path = _beside(path, "old")
    metadata = _on_all_ranks(optimizer, name, lambda: _read_metadata(path))
    _on_all_ranks(optimizer, name, lambda: refuse_damaged(path, rank, len(optimizer.watchdog.members)))
    _on_all_ranks(optimizer, name, optimizer.refresh_views)
    model_state = _on_all_ranks(optimizer, name, model.state_dict)
    _on_all_ranks(optimizer, name, lambda: _refuse_other_model(metadata, model_state))
    allocated = _on_all_ranks(optimizer, name, lambda: _allocate_state(optimizer.states.own, metadata))
    state: dict[str, Any] = {"optimizer": allocated}
    if CLASS in metadata.state_dict_metadata:
        state[CLASS] = ""
    if any(key.startswith(f"random.{rank}.") for key in metadata.state_dict_metadata):
        state["random"] = {str(rank): _random_state()}
    _on_all_ranks(optimizer, name, lambda: _read(optimizer, state, path))
    _on_all_ranks(optimizer, name, lambda: _refuse_other_class(optimizer, state.get(CLASS)))
    given = {**state["optimizer"], "state": {int(item): each for item, each in state["optimizer"]["state"].items()}}
    try:
        optimizer.refuse_sharded(given)
    except StateError as error:
        raise StateError(f"the {name} has failed: {error}") from error
    late = f"{name}, which has changed the model by now,"
    _on_all_ranks(optimizer, late, lambda: _read(optimizer, {"model": model_state}, path))
    _on_all_ranks(optimizer, late, lambda: optimizer.load_sharded_state_dict(given))
    model.load_state_dict(model_state)
    if "random" in state:
        _set_random_state(state["random"][str(rank)])


def _check_arguments(folder: Target, model: nn.Module, optimizer: OSS) -> Path:
    watchdog = optimizer.watchdog if isinstance(optimizer, OSS) else shared_watchdog()
    with nullcontext() if watchdog is None else report_errors(watchdog, ARGUMENTS, ADVICE):
        if not isinstance(optimizer, OSS):
            given = "None" if optimizer is None else f"a {type(optimizer).__name__}"
            advice = "give a memgraph.OSS, or use memgraph.save_state and load_state"
            raise ShardError(f"the optimizer is {given}; {advice}")
        for name, value in {"folder": folder, "model": model}.items():
            check_argument(name, value, SAVE_SHARDED_RULES)
        path = Path(folder).absolute()
    check_agreement(optimizer.watchdog, [f"{ARGUMENTS}: fine", f"the folder: {path}"], ADVICE)
    return path


def _on_all_ranks(optimizer: OSS, name: str, work: Callable[[], T]) -> T:
    """Run something on this rank, and wait until all ranks have; an error of one is a StateError on all."""
    error: BaseException | None = None
    result = None
    try:
        with optimizer.watchdog.naming(name):
            result = work()
    except CollectiveError:
        raise
    except (Exception, CheckpointException) as caught:  # a CheckpointException is no Exception
        error = caught
    for rank, reason in all_failures(optimizer.watchdog, None if error is None else _reason(error), name).items():
        raise StateError(f"the {name} has failed on rank {rank}: {reason}") from error
    return cast(T, result)


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({_reason(each) for each, _ in error.failures.values()}))
    if isinstance(error, OSError) and str(error):
        return "; ".join(filter(None, (str(error), advice_for(error, ""))))
    message = isinstance(error, MemgraphError) and str(error)
    return message or f"{type(error).__name__}: {error}"


def _refuse_other_class(optimizer: OSS, saved: str | None) -> None:
    own = class_name(optimizer.optimizer_class)
    if saved is not None and saved != own and not optimizer._optimizer_load_state_dict_pre_hooks:
        raise StateError(f"it is {saved}'s, and {own} was given; make the same optimizer; nothing was changed")


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


def _clear(new: Path, path: Path) -> None:
    """Remove the new folder of an interrupted save, and give the old one its name back."""
    if path.exists() and not path.is_dir():
        raise StateError(f"{path} is no folder, so it is not replaced: name another")
    if path.exists() and any(path.iterdir()) and not (path / METADATA).exists():
        raise StateError(f"{path} is there and is no checkpoint, so it is not replaced: name another folder")
    old = _beside(path, "old")
    if _is_between_names(path):
        os.rename(old, path)
    for left in (new, old):
        if left.exists():
            shutil.rmtree(left)


def _is_between_names(path: Path) -> bool:
    """Return True if a save was killed after it had renamed the old folder and before it had renamed the new one.

    Without a new folder, the checkpoint was removed since, and the rest of the old one must not be loaded.
    """
    return not path.exists() and _beside(path, "old").exists() and _beside(path, "new").exists()


def _read_metadata(folder: Path) -> Metadata:
    try:
        metadata = Reader(folder).read_metadata()
    except NotADirectoryError as error:
        advice = "give a folder of save_sharded, or load a file with memgraph.load_state"
        raise StateError(f"{folder} is no folder; {advice}") from error
    except FileNotFoundError as error:
        raise StateError(f"there is no checkpoint in {folder}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise StateError(f"{folder / METADATA} is damaged: {error}") from error
    if not any(name.startswith("optimizer.param_groups.0.") for name in metadata.state_dict_metadata):
        raise StateError(f"{folder} has no 'optimizer' in it; save it with save_sharded")
    return metadata


def _refuse_other_model(metadata: Metadata, model: Mapping[str, Any]) -> None:
    entries = {name: each for name, each in metadata.state_dict_metadata.items() if name.startswith("model.")}
    saved = {name[6:]: each for name, each in entries.items() if isinstance(each, TensorStorageMetadata)}
    wanted = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
    if strange := sorted(set(saved) ^ set(wanted)):
        raise StateError(f"it is of another model: {strange[0]!r} is only in one of them; nothing was changed")
    for name, tensor in wanted.items():
        size, dtype = saved[name].size, saved[name].properties.dtype
        if (size, dtype) != (tensor.shape, tensor.dtype):
            kinds = f"{dtype}{list(size)} in it and {tensor.dtype}{list(tensor.shape)} in the model"
            raise StateError(f"it is of another model: {name!r} is {kinds}; nothing was changed")


def _allocate_state(own: OwnState, metadata: Metadata) -> dict[str, Any]:
    """Return a state dict that torch.distributed.checkpoint fills with this rank's part of a checkpoint."""
    owned = {shard.param for shard, _ in own.layout.own_shards()}
    tree: dict[Any, Any] = {"state": {}, "param_groups": {}}
    for name, entry in metadata.state_dict_metadata.items():
        top, *path = metadata.planner_data[name]
        if top == "optimizer" and path[0] == "param_groups":
            _put(tree, path, None)
        elif top == "optimizer" and path[0] == "state":
            value = _allocate(own, entry, path, owned)
            if value is not ELSEWHERE:
                _put(tree, path, value)
    return {"state": _with_lists(tree["state"]), "param_groups": _with_lists(tree["param_groups"])}


def _allocate(own: OwnState, entry: object, path: Sequence[Any], owned: Collection[int]) -> Any:
    """Allocate rows on each rank if an entry has its parameter's shape, else all of it on the owners."""
    item, parameters = int(path[1]), own.layout.parameters
    if item >= len(parameters):
        raise StateError(f"it has a state of parameter {item}, and the optimizer has {len(parameters)}")
    if isinstance(entry, TensorStorageMetadata):
        shape, dtype = entry.size, entry.properties.dtype
        if len(path) == 3 and shape == parameters[item].shape and shape.numel() and len(shape):
            return empty_dtensor(own, item, dtype)
        return torch.zeros(shape, dtype=dtype) if item in owned else ELSEWHERE
    return None if item in owned else ELSEWHERE


def _put(tree: dict[Any, Any], path: Sequence[Any], value: object) -> None:
    *keys, last = path
    for key in keys:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(name, int) for name in tree):
        return [_with_lists(tree[name]) for name in sorted(tree)]
    return {name: _with_lists(each) for name, each in tree.items()}


class _Writer(FileSystemWriter):
    """Torch's writer, which raises the OSError behind torch's error about the length of a file."""

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def _write(optimizer: OSS, state: dict[str, Any], new: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed")
        save(state, storage_writer=_Writer(new), process_group=optimizer.watchdog.group)


def _read(optimizer: OSS, state: dict[str, Any], path: Path) -> None:
    """Fill the tensors of a state in place, and replace its other values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed")
        load(state, storage_reader=Reader(path), planner=Planner(), process_group=optimizer.watchdog.group)


def _replace(new: Path, path: Path) -> None:
    sync_folder(new)
    if not path.exists():
        os.rename(new, path)
    elif not _exchange_names(new, path):
        old = _beside(path, "old")
        os.rename(path, old)
        try:
            os.rename(new, path)
        except OSError:
            os.rename(old, path)
            raise
        new = old
    sync_folder(path.parent)
    if new.exists():
        shutil.rmtree(new)


def _exchange_names(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; return False if the file system can't."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)


def _random_state() -> dict[str, torch.Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
