"""State dicts of a model in stages.

rank 1: {"last.weight": ...}               <-  a state dict of the whole model
all ranks: their entries                   ->  rank 0: the state dict of the whole model

A state dict in safetensors files, read entry by entry.

model-00001-of-00002.safetensors, model-00002-of-00002.safetensors    ->    {"embed.weight": ..., ...}, read one by one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import StateError
from ..ranks.messages import Message, receive, send, wait_for
from ..ranks.stage_group import StageGroup
from .stage_tensors import all_tensors


def load_own(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy this rank's entries out of a state dict of the whole module.

    Raises:
        StateError: an entry is missing or has another shape; nothing was changed.
    """
    copies = [(own, _entry(state, keys, own)) for keys, own in _tensors(module) if not own.is_meta]
    with torch.no_grad():
        for own, value in copies:
            own.copy_(value)


def load_files(module: nn.Module, paths: Sequence[str | PathLike[str]]) -> None:
    """Copy this rank's entries out of safetensors files of the whole module.

    Raises:
        StateError: a file can't be read, or an entry is missing or has another shape; nothing was changed.
    """
    with SafetensorsState(paths) as state:
        load_own(module, state)


def full_state_dict(module: nn.Module, group: StageGroup, owned: Sequence[frozenset[str]]) -> dict[str, Any]:
    """Return a copy of the state dict of the whole module on rank 0, and an empty one on the others.

    Args:
        owned: the names of the tensors that each stage has.
    """
    names = {id(tensor): name for name, tensor in all_tensors(module).items()}
    whole: dict[str, Any] = module.state_dict()
    for keys, value in _tensors(module):
        owner = min(stage for stage, own in enumerate(owned) if names[id(value)] in own) % group.ranks
        gathered = _gathered(group, keys[0], value.detach(), owner)
        whole |= dict.fromkeys(keys, gathered)
    return whole if group.rank == 0 else {}


def _tensors(module: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """Yield the tensors that a state dict has, each with its names there."""
    keys, tensors = dict[int, list[str]](), dict[int, Tensor]()
    for key, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            keys.setdefault(id(value), []).append(key)
            tensors[id(value)] = value
    yield from ((keys[number], tensor) for number, tensor in tensors.items())


def _entry(state: Mapping[str, Any], keys: Sequence[str], own: Tensor) -> Tensor:
    known = [key for key in keys if key in state]
    if not known:
        raise StateError(f"the state dict has no {keys[0]!r}, which this rank's stage has; nothing was loaded")
    value = state[known[0]]
    if not isinstance(value, Tensor) or value.shape != own.shape:
        given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise StateError(f"{known[0]!r} is {given} in the state dict, {list(own.shape)} here; nothing was loaded")
    return value


def _gathered(group: StageGroup, key: str, value: Tensor, owner: int) -> Tensor:
    """Return a copy of the tensor on rank 0, sent by the rank that has it; later steps leave it as it is."""
    message = Message(key, torch.empty_like(value, device="cpu" if group.rank == 0 else "meta"), owner, 0)
    if owner and group.rank == owner:
        wait_for(group, send(group, [(message, value)]))
    if group.rank:
        return value
    return receive(group, [message]).wait()[key] if owner else value.clone()


class SafetensorsState(Mapping[str, Tensor]):
    """The tensors of some files by name, while the context is open."""

    def __init__(self, paths: Sequence[str | PathLike[str]]) -> None:
        self._paths = paths
        self._files: dict[str, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> SafetensorsState:
        """
        Raises:
            StateError: a file can't be read, or two have a tensor of the same name.
        """
        from safetensors import SafetensorError, safe_open

        for path in self._paths:
            try:
                file = self._open.enter_context(safe_open(str(path), "pt"))
            except (OSError, SafetensorError) as error:
                raise StateError(f"{path} can't be read as a safetensors file: {error}; nothing was loaded") from error
            names = list(file.keys())
            if twice := [name for name in names if name in self._files]:
                raise StateError(f"{twice[0]!r} is in {path} and in a file before it; nothing was loaded")
            self._files |= dict.fromkeys(names, file)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
