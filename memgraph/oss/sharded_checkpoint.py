"""A sharded training in a folder that torch.distributed.checkpoint reads, replaced whole or not at all.

    memgraph.save_sharded("run", model, optimizer)     # on all ranks: each writes its part
    memgraph.load_sharded("run", model, optimizer)     # on all ranks, however many; goes on bit for bit

    model.*, optimizer.state.0.exp_avg, ..., optimizer.param_groups.0.lr     # names, as load wants them

A folder is written beside it, brought to disk, and then takes its name.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..errors import CollectiveError, MemgraphError, ShardError, StateError
from ..optim.validate_state import class_name
from ..options.argument_rules import SAVE_SHARDED_RULES, check_argument
from ..storage.spill_file import advice_for
from .checkpoint.room import allocate_room, compare_metadata, metadata
from .checkpoint.safe_reader import METADATA, Planner, Reader, note_checksums, refuse_damaged
from .comm.agreement import check_agreement, report_errors
from .comm.failures import failures
from .optimizer import OSS, only_watch

Target = str | os.PathLike[str]
T = TypeVar("T")
ARGUMENTS, ADVICE = "the arguments", "Give the same on all ranks"
CLASS = "optimizer_class"  # the key of its name, which older folders have not
HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


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
    whole = _agreed(folder, model, optimizer)
    optimizer.awaited.gather()
    new, first = _beside(whole, "new"), optimizer.watch.group.rank() == 0
    rank, name = str(optimizer.watch.group.rank()), f"saving of {whole}"
    there = _together(optimizer, name, model.state_dict)
    state: dict[str, Any] = {"model": there, "optimizer": optimizer.sharded_state_dict(), "random": {rank: _random()}}
    state[CLASS] = class_name(optimizer.optim)
    _together(optimizer, name, lambda: _clear(new, whole) if first else None)
    try:
        _together(optimizer, name, lambda: _write(optimizer, state, new))
        _together(optimizer, name, lambda: note_checksums(new, int(rank)))
        _together(optimizer, name, lambda: _take(new, whole) if first else None)
    except StateError:
        if first:
            shutil.rmtree(new, ignore_errors=True)
        raise


def load_sharded(folder: Target, model: nn.Module, optimizer: OSS) -> None:
    """Bring model, optimizer and random generators to where they were when `folder` was saved, on any number of ranks.

    Every rank of the optimizer's group has to call it. A rank that was not there then keeps its random numbers. The
    folder is compared with its checksums first, a part of it on each rank.

    Raises:
        StateError: it can't be read, or is of another model or optimizer. Nothing was changed, unless it says so.
        TypeError, ValueError, ShardError: an argument is wrong; on that rank, and nothing was changed.
        AgreementError: ranks were given different folders, or another rank a wrong argument.
        CollectiveError: a rank is gone.
    """
    whole, rank = _agreed(folder, model, optimizer), str(optimizer.watch.group.rank())
    optimizer.awaited.gather()  # after a torn step, too
    name = f"loading of {whole}"
    if _is_between_names(whole):
        whole = _beside(whole, "old")
    found = _together(optimizer, name, lambda: metadata(whole))
    _together(optimizer, name, lambda: refuse_damaged(whole, int(rank), len(optimizer.watch.members)))
    _together(optimizer, name, optimizer.follow)
    there = _together(optimizer, name, model.state_dict)
    _together(optimizer, name, lambda: compare_metadata(found, there))
    state: dict[str, Any] = {"optimizer": _together(optimizer, name, lambda: allocate_room(optimizer, found))}
    if CLASS in found.state_dict_metadata:
        state[CLASS] = ""
    if any(key.startswith(f"random.{rank}.") for key in found.state_dict_metadata):
        state["random"] = {rank: _random()}
    _together(optimizer, name, lambda: _read(optimizer, state, whole))
    _together(optimizer, name, lambda: _refuse_other_classes(optimizer, state.get(CLASS)))
    given = {**state["optimizer"], "state": {int(item): each for item, each in state["optimizer"]["state"].items()}}
    try:
        optimizer.refuse_sharded(given)
    except StateError as error:
        raise StateError(f"the {name} has failed: {error}") from error
    late = f"{name}, which has changed the model by now,"
    _together(optimizer, late, lambda: _read(optimizer, {"model": there}, whole))
    _together(optimizer, late, lambda: optimizer.load_sharded_state_dict(given))
    model.load_state_dict(there)
    if "random" in state:
        _draw_as(state["random"][rank])


def _agreed(folder: Target, model: nn.Module, optimizer: OSS) -> Path:
    """Return the folder, which is the same on all ranks: parts in different ones are no checkpoint.

    Raises:
        TypeError, ValueError, ShardError: an argument of this rank is wrong.
        AgreementError: one of another rank is, or the folder is another there.
    """
    watch = optimizer.watch if isinstance(optimizer, OSS) else only_watch()
    with nullcontext() if watch is None else report_errors(watch, ARGUMENTS, ADVICE):
        if not isinstance(optimizer, OSS):
            found = "None" if optimizer is None else f"a {type(optimizer).__name__}"
            advice = "give a memgraph.OSS, or use memgraph.save_state and load_state"
            raise ShardError(f"the optimizer is {found}; {advice}")
        for name, value in {"folder": folder, "model": model}.items():
            check_argument(name, value, SAVE_SHARDED_RULES)
        whole = Path(folder).absolute()
    check_agreement(optimizer.watch, [f"{ARGUMENTS}: fine", f"the folder: {whole}"], ADVICE)
    return whole


def _together(optimizer: OSS, name: str, work: Callable[[], T]) -> T:
    """What this rank does; fails on all ranks if it does on one, and ends when all have done it."""
    trouble: BaseException | None = None
    found = None
    try:
        with optimizer.watch.naming(name):
            found = work()
    except CollectiveError:
        raise
    except (Exception, CheckpointException) as error:  # which is no Exception
        trouble = error
    for rank, told in failures(optimizer.watch, None if trouble is None else _reason(trouble), name).items():
        raise StateError(f"the {name} has failed on rank {rank}: {told}") from trouble
    return cast(T, found)


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({_reason(each) for each, _ in error.failures.values()}))
    if isinstance(error, OSError) and str(error):
        return "; ".join(filter(None, (str(error), advice_for(error, ""))))
    known = isinstance(error, MemgraphError) and str(error)
    return known or f"{type(error).__name__}: {error}"


def _refuse_other_classes(optimizer: OSS, saved: str | None) -> None:
    own = class_name(optimizer.optim)
    if saved is not None and saved != own and not optimizer._optimizer_load_state_dict_pre_hooks:
        raise StateError(f"it is {saved}'s, and {own} was given; make the same optimizer; nothing was changed")


def _beside(whole: Path, kind: str) -> Path:
    return whole.with_name(f".{whole.name}.{kind}")


def _clear(new: Path, whole: Path) -> None:
    """Make room for a new folder, where an interrupted save may have left its own, and give back the name that it has
    taken."""
    if whole.exists() and not whole.is_dir():
        raise StateError(f"{whole} is no folder, so it is not replaced: name another")
    if whole.exists() and any(whole.iterdir()) and not (whole / METADATA).exists():
        raise StateError(f"{whole} is there and is no checkpoint, so it is not replaced: name another folder")
    old = _beside(whole, "old")
    if _is_between_names(whole):
        os.rename(old, whole)
    for left in (new, old):
        if left.exists():
            shutil.rmtree(left)


def _is_between_names(whole: Path) -> bool:
    """Whether a save has died when the old folder had given up its name and the new one had not yet taken it. Where
    there is no new one, the folder has been removed since, and what is left of the old one is not to be loaded."""
    return not whole.exists() and _beside(whole, "old").exists() and _beside(whole, "new").exists()


class _Writer(FileSystemWriter):
    """Torch's own, which says why it could not write, and not only that the file is not as long as it should be."""

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            why: BaseException | None = error
            while why is not None and not isinstance(why, OSError):
                why = why.__cause__ or why.__context__
            raise why or error from None


def _write(optimizer: OSS, state: dict[str, Any], new: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed")
        save(state, storage_writer=_Writer(new), process_group=optimizer.watch.group)


def _read(optimizer: OSS, state: dict[str, Any], whole: Path) -> None:
    """Fill the tensors of a state, and put its other values there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed")
        load(state, storage_reader=Reader(whole), planner=Planner(), process_group=optimizer.watch.group)


def _take(new: Path, whole: Path) -> None:
    """Let the new folder take the name, and the old one go."""
    _sync(new)
    if not whole.exists():
        os.rename(new, whole)
    elif not _exchanged(new, whole):
        old = _beside(whole, "old")
        os.rename(whole, old)
        try:
            os.rename(new, whole)
        except OSError:
            os.rename(old, whole)
            raise
        new = old
    _sync(whole.parent)
    if new.exists():
        shutil.rmtree(new)


def _exchanged(one: Path, other: Path) -> bool:
    """Let two folders have each other's name at once, where the file system can do that."""
    library = ctypes.CDLL(None, use_errno=True)
    exchange = getattr(library, "renameat2", None)
    return exchange is not None and exchange(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) == 0


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _random() -> dict[str, torch.Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _draw_as(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
