"""Give what was loaded from a mapped file memory of its own.

    optimizer.state[p]["exp_avg"]   mapped from run.pt   ->   in memory, or in a nameless file

A mapped tensor changes when somebody overwrites the file, and ends the process when somebody cuts it short.  Tensors
are copied one by one, after what they replace is gone, so that there are never two whole sets of them in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ..oss import OSS
from ..profile.memory_meter import resident_bytes
from ..storage.transfer import offload_tensors
from ..tensors.layout import is_dense
from .compiled_module import CompiledModule


class LoadedState:
    """One load of a model and its optimizer.

    Attributes:
        model_state, optimizer_state: what their `load_state_dict` is to be given.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]) -> None:
        """
        Raises:
            SpillError: the disk has no room for states.
        """
        self.optimizer = None if isinstance(optimizer, OSS) else optimizer  # which copies by itself
        self.before = None if self.optimizer is None else (self.optimizer.state, self.optimizer.param_groups)
        saved = state["model"]
        # Values that are no tensors are a module's own, which may keep them as they are.
        self.model_state = type(saved)(
            (name, value if isinstance(value, Tensor) else _copied(value, None)) for name, value in saved.items()
        )
        if hasattr(saved, "_metadata"):
            self.model_state._metadata = saved._metadata
        self.optimizer_state = state["optimizer"]
        self.mapped = _addresses(self.optimizer_state)
        if self.optimizer is not None and isinstance(model, CompiledModule):
            self.optimizer_state = _at_home(model, self.optimizer_state)

    def undo(self) -> None:
        """Give the optimizer back what it had."""
        if self.optimizer is not None and self.before is not None:
            self.optimizer.state, self.optimizer.param_groups = self.before

    def keep(self) -> None:
        """Let the earlier state go, and copy what is still in the file."""
        self.before = None
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                if isinstance(state, MutableMapping):
                    for name, value in state.items():
                        state[name] = _copied(value, self.mapped)


def _at_home(model: CompiledModule, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same state in a nameless file, if it does not fit the model's budget beside its parameters and buffers."""
    target = model._planner.target
    tensors = {
        (number, name): value
        for number, entries in state["state"].items()
        for name, value in entries.items()
        if isinstance(value, Tensor) and value.dim() and value.numel() and is_dense(value)
    }
    there = resident_bytes([*model.parameters(), *model.buffers()])
    needed = there + sum(tensor.nbytes for tensor in tensors.values())
    if target.tier != "disk" or target.device.type != "cpu" or needed <= target.budget:
        return state
    moved = dict(zip(tensors, offload_tensors(list(tensors.values()), target.location), strict=True))
    states = {
        number: {name: moved.get((number, name), value) for name, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": states}


def _addresses(value: object) -> set[int]:
    """Where the storages of all tensors in a value begin."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()} if value.layout == torch.strided else set()
    if isinstance(value, Mapping):
        return set().union(*map(_addresses, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_addresses, value))
    return set()


def _copied(value: Any, only: Collection[int] | None) -> Any:
    """The same value with copies of its tensors, or `only` of those whose storage begins at one of these addresses."""
    if isinstance(value, Tensor):
        wanted = only is None or value.layout != torch.strided or value.untyped_storage().data_ptr() in only
        return value.clone() if wanted else value
    if isinstance(value, Mapping):
        return type(value)((name, _copied(part, only)) for name, part in value.items())  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)(_copied(part, only) for part in value)
    return value
