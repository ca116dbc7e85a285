"""Copy loaded tensors out of the mapped file.

    optimizer.state[p]["exp_avg"]   mapped from run.pt   ->   in memory, or in a nameless file

A mapped tensor changes when the file is overwritten, and the process crashes when the file is truncated.  Tensors are
copied one by one, after those that they replace were freed, so that memory never holds two complete sets.
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

LOADING = ("load_state_dict", "_load_from_state_dict", "set_extra_state")  # a module's methods


class LoadedState:
    """One load of a model and its optimizer.

    Attributes:
        model_state, optimizer_state: the arguments of their `load_state_dict`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]) -> None:
        """
        Raises:
            SpillError: the disk has no room for states.
        """
        self.optimizer = None if isinstance(optimizer, OSS) else optimizer  # a sharded optimizer copies on its own
        self.before = None if self.optimizer is None else (self.optimizer.state, self.optimizer.param_groups)
        self.tensors = _earlier_tensors(model)
        saved = state["model"]
        # A module may keep values that are no tensors as they are, so those are copied now.
        self.model_state = type(saved)(
            (name, value if isinstance(value, Tensor) else _copied(value, None)) for name, value in saved.items()
        )
        if hasattr(saved, "_metadata"):
            self.model_state._metadata = saved._metadata
        self.optimizer_state = state["optimizer"]
        self.mapped = _addresses(self.optimizer_state)
        if self.optimizer is not None and isinstance(model, CompiledModule):
            self.optimizer_state = offloaded_state(model, self.optimizer_state)

    def undo(self) -> None:
        """Give model and optimizer their earlier state."""
        if self.optimizer is not None and self.before is not None:
            self.optimizer.state, self.optimizer.param_groups = self.before
        with torch.no_grad():
            for tensor, earlier in self.tensors:
                tensor.copy_(earlier)

    def keep(self) -> None:
        """Free the earlier state, and copy all that is still mapped."""
        self.before = None
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                if isinstance(state, MutableMapping):
                    for name, value in state.items():
                        state[name] = _copied(value, self.mapped)


def _earlier_tensors(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of a module with copies of them, if code that is not torch's loads it, which may fail."""
    if not any(map(_loads_on_its_own, model.modules())):
        return []
    return [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]


def _loads_on_its_own(module: nn.Module) -> bool:
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    kind = next(kind for kind in type(module).__mro__ if any(name in vars(kind) for name in LOADING))
    return bool(hooks) or kind.__module__.partition(".")[0] not in ("torch", "memgraph")


def offloaded_state(model: CompiledModule, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state in a nameless file if it exceeds the model's budget beside parameters and buffers."""
    target = model._planner.target
    tensors = {
        (number, name): value
        for number, entries in state["state"].items()
        for name, value in entries.items()
        if isinstance(value, Tensor)
        and not hasattr(value, "__tensor_flatten__")
        and value.dim()
        and value.numel()
        and is_dense(value)
    }
    owned_nbytes = resident_bytes([*model.parameters(), *model.buffers()])
    needed = owned_nbytes + sum(tensor.nbytes for tensor in tensors.values())
    if not target.tiers or target.device.type != "cpu" or needed <= target.budget:
        return state
    moved = dict(zip(tensors, offload_tensors(list(tensors.values()), target.location), strict=True))
    states = {
        number: {name: moved.get((number, name), value) for name, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": states}


def _addresses(value: object) -> set[int]:
    """Return the addresses of all storages in a value."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()} if value.layout == torch.strided else set()
    if isinstance(value, Mapping):
        return set().union(*map(_addresses, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_addresses, value))
    return set()


def _copied(value: Any, addresses: Collection[int] | None) -> Any:
    """Return the value with copies of its tensors, or only of those with a storage at one of these addresses."""
    if isinstance(value, Tensor):
        is_chosen = (
            addresses is None or value.layout != torch.strided or value.untyped_storage().data_ptr() in addresses
        )
        return value.clone() if is_chosen else value
    if isinstance(value, Mapping):
        return type(value)((name, _copied(part, addresses)) for name, part in value.items())  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)(_copied(part, addresses) for part in value)
    return value
