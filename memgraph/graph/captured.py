"""The graph of a whole step, and the roles of its inputs and outputs.

placeholders `inputs`  ->  forward ops, backward ops  ->  results `outputs`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from ..tensors.pytree import Spec, unflatten
from ..tensors.traced_float import FloatNode, FloatValues, SpecialValue


@dataclass(frozen=True, eq=False)
class Captured:
    """A step.  The graph's placeholders are `inputs`, it returns `outputs`, and its nodes bear `val`, `phase`, `where`.

    `leaves` and `spec` are the module's result; a `Ref` stands for each of its tensors.  `differentiable` are the
    outputs that require a gradient in eager, `tangents` those of them that backward starts from.  Of these `hoped` are
    those beside the scalars: whether a loss is made of them is yet to be seen.  `updates` names the parameters that
    backward updates by itself, `exchanged` those whose gradients it averages over ranks, `gathers` the buckets of which
    forward gathers what other ranks have updated, `sources` the outputs that each gradient comes from; `rewritten` says
    of inputs that forward changes in place, and that autograd follows, which output has their new value.  `custom` is
    whether an output was made by an autograd.Function of Python's, which may hold what no graph shows.
    `floats` are the Python floats that ops read and each call gives, `float_values` the values at capture of those that
    they are computed from, `special_values` those at which the graph would be another.
    """

    graph: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    leaves: tuple[Any, ...]
    spec: Spec
    differentiable: tuple[int, ...]
    tangents: tuple[int, ...]
    hoped: tuple[int, ...] = ()
    updates: tuple[str, ...] = ()
    sources: Mapping[Output, frozenset[int]] = field(default_factory=dict)
    exchanged: tuple[str, ...] = ()
    gathers: frozenset[int] = frozenset()
    custom: bool = False
    rewritten: Mapping[int, int] = field(default_factory=dict)
    floats: tuple[FloatNode, ...] = ()
    float_values: FloatValues = field(default_factory=dict)
    special_values: tuple[SpecialValue, ...] = ()

    def result(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """What the module returns, of what the graph returned and of the real tensors that it read."""
        tensors = {"output": outputs, "input": inputs}
        found: dict[Ref, Tensor] = {}  # a tensor that is returned twice is one
        for leaf in self.leaves:
            if isinstance(leaf, Ref) and leaf not in found:
                found[leaf] = leaf.of(tensors[leaf.kind][leaf.index])
        return unflatten([found[leaf] if isinstance(leaf, Ref) else leaf for leaf in self.leaves], self.spec)


@dataclass(frozen=True)
class Input:
    """What a placeholder stands for: a parameter or buffer by its name, an input by its place among the different
    tensors that the call is given, a tangent by the place of its output."""

    kind: Literal["parameter", "buffer", "input", "tangent"]
    name: str = ""
    index: int = -1

    @property
    def label(self) -> str:
        """As an error names it."""
        return f"{self.kind} {self.name or self.index}"


@dataclass(frozen=True)
class Output:
    """What the graph returns at a place: an output, the gradient of the parameter `name` or of the input `index`, or
    this rank's part of what all ranks have of the bucket `index`."""

    kind: Literal["output", "gradient", "input_gradient", "shard"]
    name: str = ""
    index: int = -1


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor in the module's result: an output of the graph, or an input that was handed through, as it is
    or as a view of it."""

    kind: Literal["output", "input"]
    index: int
    view: View | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """What it stands for, of the output or input at its place."""
        return tensor if self.view is None else self.view.on(tensor)


@dataclass(frozen=True)
class View:
    """How a view lies in what it is a view of; autograd knows nothing of it, least of all if it is `detached`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    detached: bool

    @classmethod
    def of(cls, tensor: Tensor, source: Tensor) -> View | None:
        """How a tensor lies in another one; None if it is none of its views, or one that has to be computed."""
        is_seen = tensor.requires_grad and torch.is_grad_enabled()
        if is_seen or tensor.layout != torch.strided or tensor.dtype != source.dtype:
            return None
        if tensor.untyped_storage()._cdata != source.untyped_storage()._cdata or tensor.is_conj() or tensor.is_neg():
            return None
        offset = int(tensor.storage_offset() - source.storage_offset())
        return cls(tuple(tensor.shape), tensor.stride(), offset, tensor._base is not source)

    def on(self, source: Tensor) -> Tensor:
        """The view of the real one."""
        source = source.detach() if self.detached else source
        if (self.shape, self.stride, self.offset) == (source.shape, source.stride(), 0) and self.detached:
            return source
        return source.as_strided(self.shape, self.stride, source.storage_offset() + self.offset)
