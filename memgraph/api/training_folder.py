"""Save a training to a folder of torch.distributed.checkpoint, which is replaced whole or not at all.

    memgraph.save_sharded("run", model, optimizer)     # one process, or all ranks: each writes its part
    memgraph.load_sharded("run", model, optimizer)     # in one process, or on any number of ranks, bit for bit

    model.*, optimizer.state.0.exp_avg, ..., optimizer.param_groups.0.lr     # names in the checkpoint

A new folder is written beside the old one and synced to disk, and then takes its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import ShardError, StateError
from ..optim.validate_state import check_state_dict, class_name
from ..options.argument_rules import SAVE_SHARDED_RULES, check_argument
from ..oss import OSS
from ..oss.checkpoint.checkpoint_folder import CheckpointFolder
from ..oss.checkpoint.training_folder import TrainingFolder, by_number
from ..oss.comm.agreement import check_agreement, report_errors
from ..oss.comm.watchdog import shared_watchdog
from ..oss.sharded_part import ShardedPart
from .compiled_module import CompiledModule
from .loaded_state import offloaded_state
from .training_state import HOOKS, converted, kind_of, with_python_numbers, without_hooks

Target = str | os.PathLike[str]
Optimizer = torch.optim.Optimizer
ARGUMENTS, ADVICE = "the arguments", "Give the same on all ranks"


def save_sharded(folder: Target, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Write parameters, buffers, the optimizer's state and each rank's random generators to `folder`.

    With a sharded optimizer every rank of its group has to call it, with the same folder, which they share. Whatever
    happens meanwhile, `folder` is the old one or the new one.

    Raises:
        StateError: it can't be written; says on which rank, and why.
        TypeError, ValueError, ShardError: an argument is wrong; on that rank, and nothing was written. The optimizer of
            several ranks has to be sharded.
        AgreementError: ranks were given different folders, or another rank a wrong argument.
        CollectiveError: a rank is gone.
        FusedError: only some parameters are updated, since a backward with `fuse_update` failed.
    """
    _training(folder, model, optimizer, "saving of").save()


def load_sharded(folder: Target, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Load model, optimizer and random generators from a folder of `save_sharded`, of any number of ranks.

    With a sharded optimizer every rank of its group has to call it. A rank that the saved training did not have keeps
    its random numbers. The folder is compared with its checksums first, a part of it on each rank. Without an optimizer
    its state is left out.

    Raises:
        StateError: it can't be read, or is of another model or optimizer. Nothing was changed, unless it says so.
        TypeError, ValueError, ShardError: an argument is wrong; on that rank, and nothing was changed.
        AgreementError: ranks were given different folders, or another rank a wrong argument.
        CollectiveError: a rank is gone.
    """
    _training(folder, model, optimizer, "loading of").load()


def _training(folder: Target, model: nn.Module, optimizer: Optimizer | None, what: str) -> TrainingFolder:
    """Return the training of this rank, once arguments are right on all ranks and pending gathers have ended."""
    watchdog = optimizer.watchdog if isinstance(optimizer, OSS) else shared_watchdog()
    with nullcontext() if watchdog is None else report_errors(watchdog, ARGUMENTS, ADVICE):
        _refuse_unsharded(optimizer)
        for name, value in {"folder": folder, "model": model, "optimizer": optimizer}.items():
            check_argument(name, value, SAVE_SHARDED_RULES)
        path = Path(os.path.realpath(folder))  # a link stays, and leads to the new folder
        if any(each.is_meta for each in (*model.parameters(), *model.buffers())):
            raise StateError("the model is on the meta device, where it has no values: give it memory with to_empty()")
        if isinstance(model, CompiledModule) and what.startswith("saving"):
            model.refuse_partial_update()
    if not isinstance(optimizer, OSS):
        part = None if optimizer is None else PlainPart(model, optimizer)
        return TrainingFolder(CheckpointFolder(path, f"{what} {path}", None), model, part)
    check_agreement(optimizer.watchdog, [f"{ARGUMENTS}: fine", f"the folder: {path}"], ADVICE)
    optimizer.pending_gathers.gather()  # also after a step that has failed halfway
    saved = CheckpointFolder(path, f"{what} {path}", optimizer.watchdog)
    saved.on_all_ranks(optimizer.refresh_views)
    return TrainingFolder(saved, model, ShardedPart(optimizer))


def _refuse_unsharded(optimizer: object) -> None:
    """Refuse an optimizer of several ranks that each has as a whole: they would write the same."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and not isinstance(optimizer, OSS):
        given = "None" if optimizer is None else f"a {type(optimizer).__name__}"
        advice = "give a memgraph.OSS, as there are several ranks, or use memgraph.save_state and load_state"
        raise ShardError(f"the optimizer is {given}; {advice}")


class PlainPart:
    """The states of an optimizer that one process has."""

    needed = "optimizer.param_groups.0."

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.kind, self.converts = class_name(kind_of(optimizer)), bool(getattr(optimizer, HOOKS, None))
        self.parameters = [each for group in optimizer.param_groups for each in group["params"]]

    def saved(self) -> dict[str, Any]:
        state: dict[str, Any] = with_python_numbers(self.optimizer.state_dict())
        return state

    def room(self, path: Sequence[Any], entry: object) -> object:
        """Return an empty tensor, with the strides of its parameter if it has the shape."""
        if not isinstance(entry, TensorStorageMetadata):
            return None
        number, dtype = int(path[1]) if path[0] == "state" else -1, entry.properties.dtype
        if 0 <= number < len(self.parameters) and self.parameters[number].shape == entry.size:
            return torch.empty_like(self.parameters[number], dtype=dtype, device="cpu", requires_grad=False)
        return torch.empty(entry.size, dtype=dtype)

    def checked(self, loaded: Mapping[str, Any], folder: CheckpointFolder) -> Callable[[], None]:
        given = by_number(loaded)
        state = folder.on_all_ranks(lambda: self._converted(given))

        def install() -> None:
            with without_hooks(self.optimizer):
                self.optimizer.load_state_dict(state)

        return install

    def _converted(self, given: dict[str, Any]) -> dict[str, Any]:
        state = dict(converted(self.optimizer, given))
        check_state_dict(self.optimizer, state)
        return offloaded_state(self.model, state) if isinstance(self.model, CompiledModule) else state
