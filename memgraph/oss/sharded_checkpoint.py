"""Save a sharded training to a folder of torch.distributed.checkpoint, which is replaced whole or not at all.

    memgraph.save_sharded("run", model, optimizer)     # on all ranks: each writes its part
    memgraph.load_sharded("run", model, optimizer)     # on any number of ranks; training goes on bit for bit

    model.*, optimizer.state.0.exp_avg, ..., optimizer.param_groups.0.lr     # names in the checkpoint

A new folder is written beside the old one and synced to disk, and then takes its name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import ShardError, StateError
from ..optim.validate_state import class_name
from ..options.argument_rules import SAVE_SHARDED_RULES, check_argument
from .checkpoint.checkpoint_folder import CheckpointFolder
from .checkpoint.own_state import OwnState
from .checkpoint.sharded_state import empty_dtensor
from .comm.agreement import check_agreement, report_errors
from .comm.watchdog import shared_watchdog
from .optimizer import OSS

Target = str | os.PathLike[str]
ARGUMENTS, ADVICE = "the arguments", "Give the same on all ranks"
CLASS = "optimizer_class"  # key of its name; older folders have none
ELSEWHERE = object()  # an entry that only other ranks read


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
    saved = CheckpointFolder(path, f"saving of {path}", optimizer.watchdog)
    model_state = saved.on_all_ranks(model.state_dict)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer.sharded_state_dict()}
    rank = optimizer.watchdog.group.rank()
    saved.save(state | {"random": {str(rank): random_state()}, CLASS: class_name(optimizer.optimizer_class)})


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
    optimizer.pending_gathers.gather()  # also after a step that has failed halfway
    rank, saved = optimizer.watchdog.group.rank(), CheckpointFolder(path, f"loading of {path}", optimizer.watchdog)
    metadata = saved.metadata("optimizer.param_groups.0.")
    saved.on_all_ranks(optimizer.refresh_views)
    model_state = saved.on_all_ranks(model.state_dict)
    saved.on_all_ranks(lambda: refuse_other_model(metadata, model_state))
    state: dict[str, Any] = {"optimizer": saved.on_all_ranks(lambda: _allocate_state(optimizer.states.own, metadata))}
    if CLASS in metadata.state_dict_metadata:
        state[CLASS] = ""
    if any(key.startswith(f"random.{rank}.") for key in metadata.state_dict_metadata):
        state["random"] = {str(rank): random_state()}
    saved.read(state)
    saved.on_all_ranks(lambda: _refuse_other_class(optimizer, state.get(CLASS)))
    given = {**state["optimizer"], "state": {int(item): each for item, each in state["optimizer"]["state"].items()}}
    try:
        optimizer.refuse_sharded(given)
    except StateError as error:
        raise StateError(f"the {saved.name} has failed: {error}") from error
    saved.read({"model": model_state}, late=True)
    saved.on_all_ranks(lambda: optimizer.load_sharded_state_dict(given), late=True)
    model.load_state_dict(model_state)
    if "random" in state:
        set_random_state(state["random"][str(rank)])


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


def _refuse_other_class(optimizer: OSS, saved: str | None) -> None:
    own = class_name(optimizer.optimizer_class)
    if saved is not None and saved != own and not optimizer._optimizer_load_state_dict_pre_hooks:
        raise StateError(f"it is {saved}'s, and {own} was given; make the same optimizer; nothing was changed")


def refuse_other_model(metadata: Metadata, model: Mapping[str, Any]) -> None:
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
            put(tree, path, None)
        elif top == "optimizer" and path[0] == "state":
            value = _allocate(own, entry, path, owned)
            if value is not ELSEWHERE:
                put(tree, path, value)
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


def put(tree: dict[Any, Any], path: Sequence[Any], value: object) -> None:
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


def random_state() -> dict[str, torch.Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
