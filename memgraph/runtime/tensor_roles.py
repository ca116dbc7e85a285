"""The roles of the tensors that a step reads and returns.

reads w, b, x; returns y, dw, db    ->   one output; dw is the gradient of input 0, db of input 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..graph.captured import Captured, Output
from ..guards.owned_tensors import has_hooks

Key = tuple[str, str, int]  # kind, name and index of an input


@dataclass(frozen=True, eq=False)
class TensorRoles:
    """The tensors of one step.  Places are positions among its inputs, without tangents.

    Attributes:
        outputs: the number of tensors that forward returns to the caller.
        tangents: the outputs that backward starts from.
        gradients: what backward returns; behind them come this rank's shards of the buckets `shards`.
        updates: the places of the parameters that backward updates, by name.
        exchanged: the places of the parameters whose gradients backward averages over ranks, by name.
        added_nbytes: of the gradients, then of the shards, that backward adds to; empty if it adds to none.
    """

    outputs: int
    tangents: tuple[int, ...]
    gradients: tuple[Output, ...]
    shards: tuple[int, ...]
    place: Mapping[Key, int]
    updates: Mapping[str, int]
    exchanged: Mapping[str, int]
    added_nbytes: tuple[int, ...]

    @classmethod
    def of(cls, captured: Captured, added_nbytes: Sequence[int], updated: Iterable[str]) -> TensorRoles:
        """Return the roles in a captured step; `updated` are the parameters that backward updates."""
        inputs = [role for role in captured.inputs if role.kind != "tangent"]
        place: dict[Key, int] = {(role.kind, role.name, role.index): i for i, role in enumerate(inputs)}
        return cls(
            outputs=sum(role.kind == "output" for role in captured.outputs),
            tangents=tuple(role.index for role in captured.inputs if role.kind == "tangent"),
            gradients=tuple(role for role in captured.outputs if role.kind not in ("output", "shard")),
            shards=tuple(role.index for role in captured.outputs if role.kind == "shard"),
            place=place,
            updates={name: place["parameter", name, -1] for name in updated},
            exchanged={name: place["parameter", name, -1] for name in captured.reduced},
            added_nbytes=tuple(added_nbytes),
        )

    @property
    def adds(self) -> bool:
        """Return True if backward adds to existing gradients."""
        return bool(self.added_nbytes)

    @cached_property
    def added(self) -> tuple[tuple[int, int], ...]:
        """The places of the parameters whose gradients backward adds to, with the bytes of each."""
        return tuple(zip(self._trained, self.added_nbytes[: len(self._trained)], strict=True)) if self.adds else ()

    @cached_property
    def added_shards(self) -> tuple[tuple[int, int], ...]:
        """The buckets whose shards backward adds to, with the bytes of each."""
        return tuple(zip(self.shards, self.added_nbytes[len(self._trained) :], strict=True)) if self.adds else ()

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The places of all parameters that backward computes gradients of."""
        return (*self._trained, *self.updates.values(), *self.exchanged.values())

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """The places of the inputs that the gradients belong to."""
        return tuple(map(self._target, self.gradients))

    def owners_of_gradients(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Return, for each gradient, the parameter whose `.grad` backward may set by itself; None for the others."""
        rows = zip(self.gradients, self.targets, strict=True)
        owners = [tensors[place] if role.kind == "gradient" else None for role, place in rows]
        return [None if owner is None or has_hooks(owner) else owner for owner in owners]

    @cached_property
    def varying(self) -> tuple[int, ...]:
        """The places of the caller's inputs."""
        return tuple(i for (kind, _, _), i in self.place.items() if kind == "input")

    def _target(self, role: Output) -> int:
        return self.place["parameter" if role.kind == "gradient" else "input", role.name, role.index]

    @cached_property
    def _trained(self) -> tuple[int, ...]:
        rows = zip(self.gradients, self.targets, strict=True)
        return tuple(target for role, target in rows if role.kind == "gradient")
