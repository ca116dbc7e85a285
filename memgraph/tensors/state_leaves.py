"""Find the tensors in the state of a parameter, however deep they are held, so that others can take their places.

{"step": f32[], "exp_avg": AdamW8bit's (codes u8[n], scale f32[n / 256])}   ->   exp_avg.codes, exp_avg.scale
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .layout import is_dense

SMALLEST = 4096  # bytes of a leaf that is moved: a page, below which a copy carries mostly what was not asked for


@dataclass(frozen=True, eq=False)
class StateLeaf:
    """A dense tensor with dimensions: its name, and what holds it."""

    name: str
    tensor: Tensor
    holder: Any  # a dict, a list, or a tensor of a class that is made of others
    key: Any

    def put(self, tensor: Tensor) -> None:
        """Let another tensor of the same layout take the place."""
        if isinstance(self.holder, MutableMapping | list):
            self.holder[self.key] = tensor
        else:
            setattr(self.holder, self.key, tensor)


def is_movable(leaf: StateLeaf) -> bool:
    """Return True if a leaf is worth a place on a tier, and can have one."""
    return leaf.tensor.nbytes >= SMALLEST and is_dense(leaf.tensor)


def state_leaves(state: Mapping[Any, Any]) -> Iterator[StateLeaf]:
    """Yield the leaves of one parameter's state; scalars are none."""
    return _leaves(state, state.items(), "")


def _leaves(holder: Any, items: Any, prefix: str) -> Iterator[StateLeaf]:
    for key, value in items:
        name = f"{prefix}{key}"
        if hasattr(value, "__tensor_flatten__"):
            inner = value.__tensor_flatten__()[0]
            yield from _leaves(value, [(each, getattr(value, each)) for each in inner], f"{name}.")
        elif isinstance(value, Tensor):
            if value.dim():
                yield StateLeaf(name, value, holder, key)
        elif isinstance(value, Mapping):
            yield from _leaves(value, value.items(), f"{name}.")
        elif isinstance(value, list):
            yield from _leaves(value, enumerate(value), f"{name}.")
