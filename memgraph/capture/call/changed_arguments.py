"""Refuse a forward that puts something into its arguments: what is in a list or a cache is no output of a graph.

def forward(self, x, losses):
    losses.append(x.square().mean())    ->    CaptureError: forward changes its argument `losses`
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...errors import CaptureError
from ...tensors.pytree import CONSTANTS, Spec, flatten


class ChangedArgumentError(CaptureError):
    """Forward puts something into an argument, of the class `kind`."""

    def __init__(self, name: str, kind: type) -> None:
        super().__init__(
            f"forward changes its argument `{name}`, but a captured step only returns tensors: what is put "
            f"into a {kind.__name__} there would be lost. Return it, or let forward work on a copy"
        )
        self.kind = kind


class ArgumentSnapshot:
    """The containers and objects among the arguments of a call, and what is in them before it."""

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        named = (*zip(_names(module, len(args)), args, strict=True), *kwargs.items())
        self.given = {name: value for name, value in named if not isinstance(value, (Tensor, *CONSTANTS))}
        self.before = {name: flatten(value) for name, value in self.given.items()}

    def refuse_changes(self) -> None:
        """Raise if forward has put something into one of them; what it has only taken out is not missed."""
        for name, value in self.given.items():
            if _is_changed(*self.before[name], *flatten(value)):
                raise ChangedArgumentError(name, type(value))


def _is_changed(old: Sequence[Any], old_spec: Spec, new: Sequence[Any], new_spec: Spec) -> bool:
    if len(new) < len(old):
        return not all(any(_is_same(leaf, other) for other in old) for leaf in new)
    return new_spec != old_spec or not all(map(_is_same, old, new))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and type(one) is type(other) and repr(one) == repr(other))


def _names(module: nn.Module, count: int) -> list[str]:
    """Return the names of the positional arguments of a forward."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # it is no Python function
        parameters = {}.values()
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return (named + [f"argument {i}" for i in range(len(named) + 1, count + 1)])[:count]
