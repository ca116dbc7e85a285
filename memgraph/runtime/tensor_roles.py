"""Which tensor of a step is what: of those that it reads, by their places, and of those that it makes.

reads w, b, x; makes y, dw, db    ->   one output; dw is the gradient of what stands at 0, db of what stands at 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..graph.captured import Captured, Output

Key = tuple[str, str, int]  # kind, name and index of an input


@dataclass(frozen=True, eq=False)
class TensorRoles:
    """The tensors of one step; places count those that it reads, tangents left out."""

    outputs: int  # how many of the tensors that forward returns are the module's
    tangents: tuple[int, ...]  # the outputs that backward starts from
    gradients: tuple[Output, ...]  # what backward returns
    shards: tuple[int, ...]  # and behind these, this rank's parts of the buckets of these numbers
    place: Mapping[Key, int]
    updates: Mapping[str, int]  # the places of the parameters that backward updates, by their names
    exchanged: Mapping[str, int]  # and of those whose gradients it averages over ranks
    given: tuple[int, ...]  # the bytes of the gradients, and then of the parts, that backward adds to; none, or of all

    @classmethod
    def of(cls, captured: Captured, given: Sequence[int], updated: Iterable[str]) -> TensorRoles:
        """What a captured step says; `updated` are the parameters that backward updates."""
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
            given=tuple(given),
        )

    @property
    def adds(self) -> bool:
        """Whether backward adds to gradients that are there."""
        return bool(self.given)

    @cached_property
    def added(self) -> tuple[tuple[int, int], ...]:
        """The places of the parameters to whose gradients backward adds, with the bytes of each."""
        return tuple(zip(self._trained, self.given[: len(self._trained)], strict=True)) if self.adds else ()

    @cached_property
    def added_shards(self) -> tuple[tuple[int, int], ...]:
        """The buckets to whose parts backward adds, with the bytes of each."""
        return tuple(zip(self.shards, self.given[len(self._trained) :], strict=True)) if self.adds else ()

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The places of all parameters that backward has gradients of."""
        return (*self._trained, *self.updates.values(), *self.exchanged.values())

    @cached_property
    def varying(self) -> tuple[int, ...]:
        """The places of what the caller gives."""
        return tuple(i for (kind, _, _), i in self.place.items() if kind == "input")

    def target(self, role: Output) -> int:
        """The place of what a gradient is of."""
        return self.place["parameter" if role.kind == "gradient" else "input", role.name, role.index]

    @cached_property
    def _trained(self) -> tuple[int, ...]:
        return tuple(self.target(role) for role in self.gradients if role.kind == "gradient")
