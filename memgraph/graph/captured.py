"""The graph of a step, and the roles of its inputs and outputs.

placeholders `inputs`  ->  forward ops, backward ops  ->  results `outputs`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from passes.slices.row_blocks import Rows
from passes.slices.slice import Slice
from passes.slices.whole_weight import WholeWeight

from ..guards.attribute_writes import AttributeWrites
from ..guards.variable_scope import Reads
from ..report.report_data import RowBlocks
from ..tensors.differentiable import is_cut_off, is_differentiable
from ..tensors.pytree import Spec, unflatten
from ..tensors.traced_number import FloatValues, NumberNode, SpecialValue
from .guard_ops import ValueGuard
from .nodes import returned_values, tensors
from .opaque_ops import Part


@dataclass(frozen=True, eq=False)
class Captured:
    """A step. The graph has placeholders `inputs` and results `outputs`; meta of nodes has `val`, `phase`, `where`.

    `leaves` and `spec` are the module's result, with a `Ref` in place of each tensor.

    Positions of outputs: `differentiable` require a gradient in eager. `tangents` are those from which backward starts.
    `speculative_outputs` are the tangents besides the scalars, for which a loss may never be computed.
    `sources` maps each gradient to the outputs that it depends on. `rewritten` maps an input that forward changes in
    place to the output with its new value.

    Names of parameters: backward updates `updates`, and averages the gradients of `reduced` over ranks. Forward gathers
    the buckets `gathers` from other ranks. `has_custom_functions`: a Python autograd.Function computed an output, and
    may hold tensors that the graph does not show.

    Python floats: ops read `floats`, which each call gives. They are computed from floats of the call, whose values at
    capture are `float_values`. At `special_values` the graph would be another.

    Values of tensors: the graph rests on `guards`. To find these values, forward ran once. That, and measuring parts,
    allocated at most `value_run_nbytes`.

    Parts of the module that run as they are: `opaque`.

    `writes` are what forward changes of attributes, with a `Ref` in place of each tensor, and a formula for numbers on
    which the graph does not depend. Outside of attributes, the graph rests on what its code `reads`.

    `slices` are carried out in the graph. `whole` is the step without them, and `whole_nbytes` its peak without a plan.

    `blocks`: the graph has an input, and a result for the gradient, for each of these rows of a parameter. `inputs` and
    `outputs` are those of the call, `graph_inputs` and `graph_outputs` those of the graph. Sums over the blocks of
    `rounded_blocks` round otherwise than on the whole. Where blocks were looked for, `whole_weights` are large weights
    that stay whole.
    """

    graph: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    leaves: tuple[Any, ...]
    spec: Spec
    differentiable: tuple[int, ...]
    tangents: tuple[int, ...]
    speculative_outputs: tuple[int, ...] = ()
    updates: tuple[str, ...] = ()
    sources: Mapping[Output, frozenset[int]] = field(default_factory=dict)
    reduced: tuple[str, ...] = ()
    gathers: frozenset[int] = frozenset()
    has_custom_functions: bool = False
    rewritten: Mapping[int, int] = field(default_factory=dict)
    floats: tuple[NumberNode, ...] = ()
    float_values: FloatValues = field(default_factory=dict)
    special_values: tuple[SpecialValue, ...] = ()
    guards: tuple[ValueGuard, ...] = ()
    value_run_nbytes: int = 0
    writes: AttributeWrites = field(default_factory=AttributeWrites)
    reads: Reads = field(default_factory=Reads)
    opaque: tuple[Part, ...] = ()
    slices: tuple[Slice, ...] = ()
    whole: Captured | None = None
    whole_nbytes: int = 0
    blocks: Mapping[str, tuple[Rows, ...]] = field(default_factory=dict)
    rounded_blocks: frozenset[str] = frozenset()
    whole_weights: tuple[WholeWeight, ...] = ()

    @property
    def row_blocks(self) -> tuple[RowBlocks, ...]:
        """The weights that come in blocks, as reports list them."""
        return tuple(
            RowBlocks(name, rows[0][1], len(rows), name in self.rounded_blocks) for name, rows in self.blocks.items()
        )

    @property
    def graph_inputs(self) -> tuple[Input, ...]:
        """The role of each placeholder."""
        return tuple(replace(role, rows=rows) for role in self.inputs for rows in self._rows(role))

    @property
    def graph_outputs(self) -> tuple[Output, ...]:
        """The role of each result."""
        return tuple(replace(role, rows=rows) for role in self.outputs for rows in self._rows(role))

    def in_blocks(self, roles: Sequence[Input | Output], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the tensors of inputs or results of the call as those of the graph: with views of rows."""
        if not self.blocks:
            return list(tensors)
        found: list[Tensor | None] = []
        for role, tensor in zip(roles, tensors, strict=True):
            blocks = self._rows(role)
            whole = tensor.detach() if tensor is not None and blocks != (None,) else tensor
            found += [whole if rows is None or whole is None else whole[slice(*rows)] for rows in blocks]
        return found

    @property
    def kept_nbytes(self) -> int:
        """The bytes of the step before that are in attributes which no call reads, until the step has ended."""
        unread = (leaf for write in self.writes.items if not write.is_read for leaf in write.leaves)
        kept = {(ref.kind, ref.index) for ref in unread if isinstance(ref, Ref) and not ref.is_number}
        if not kept:
            return 0
        given = zip(self.graph.graph.find_nodes(op="placeholder"), self.graph_inputs, strict=True)
        nodes = [returned_values(self.graph.graph)[index] for kind, index in kept if kind == "output"]
        wanted = {self.inputs[index] for kind, index in kept if kind == "input"}
        nodes += [node for node, role in given if role.kind == "input" and role in wanted]
        found = [tensor.untyped_storage() for node in nodes for tensor in tensors(node)]
        return sum({storage._cdata: storage.nbytes() for storage in found}.values())

    def joined_nbytes(self, sizes: Sequence[int]) -> list[int]:
        """Return bytes of gradients and shards, given those of the graph's gradients and shards in their order."""
        left = iter(sizes)
        roles = [role for role in self.outputs if role.kind in ("gradient", "shard")] if sizes else []
        return [sum(next(left) for _ in self._rows(role)) for role in roles]

    def _rows(self, role: Input | Output) -> tuple[Rows | None, ...]:
        return self.blocks.get(role.name, (None,)) if role.kind in ("parameter", "gradient") else (None,)

    @property
    def unsliced(self) -> Captured:
        """Return the step as it was captured."""
        return self.whole or self

    def fill(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], floats: Sequence[float] = ()
    ) -> Callable[[Any], Any]:
        """Return a function from a leaf of the result, or of a write, to what is returned, or written.

        Args:
            outputs: of the graph.
            inputs: the real tensors that it read.
        """
        given: Mapping[str, Sequence[Any]] = {"output": outputs, "input": inputs, "float": floats}
        made: dict[Ref, Any] = {}  # a tensor that is returned twice is one object

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, Ref) and leaf not in made:
                made[leaf] = leaf.of(given[leaf.kind][leaf.index])
            return made[leaf] if isinstance(leaf, Ref) else leaf

        return filled

    def result(self, fill: Callable[[Any], Any]) -> Any:
        """Return the module's result."""
        return unflatten([*map(fill, self.leaves)], self.spec)


@dataclass(frozen=True)
class Input:
    """The role of a placeholder: a tensor, or some rows of a parameter. A tangent has the index of its output."""

    kind: Literal["parameter", "buffer", "input", "tangent"]
    name: str = ""
    index: int = -1
    rows: Rows | None = None

    @property
    def label(self) -> str:
        """The name in an error."""
        return f"{self.kind} {self.name or self.index}"


@dataclass(frozen=True)
class Output:
    """The role of a result: an output, a gradient of a parameter, of some of its rows, or of an input, or this rank's
    shard of a bucket."""

    kind: Literal["output", "gradient", "input_gradient", "shard"]
    name: str = ""
    index: int = -1
    rows: Rows | None = None


@dataclass(frozen=True)
class Ref:
    """A tensor in the module's result: an output of the graph, or an input, possibly viewed; or the number in it.

    What attributes get may also be a float of the call.
    """

    kind: Literal["output", "input", "float"]
    index: int
    view: View | None = None
    is_number: bool = False

    def of(self, tensor: Any) -> Any:
        if self.kind == "float":
            return tensor
        if self.is_number:
            return tensor.item()
        return tensor if self.view is None else self.view.on(tensor)


@dataclass(frozen=True)
class View:
    """The layout of a view in its base. Autograd does not know it; `detached` says that not even its base does."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    detached: bool

    @classmethod
    def of(cls, tensor: Tensor, source: Tensor) -> View | None:
        """Return the layout of a tensor in another one; None if it is no view of it, or if autograd computes it."""
        grad = torch.is_grad_enabled()
        if grad and is_differentiable(tensor):
            return None
        if tensor.layout != torch.strided or tensor.dtype != source.dtype:
            return None
        if tensor.untyped_storage()._cdata != source.untyped_storage()._cdata or tensor.is_conj() or tensor.is_neg():
            return None
        offset = int(tensor.storage_offset() - source.storage_offset())
        is_detached = tensor._base is not source or (grad and is_cut_off(tensor))
        return cls(tuple(tensor.shape), tensor.stride(), offset, is_detached)

    def on(self, source: Tensor) -> Tensor:
        """Return this view of a real tensor."""
        source = source.detach() if self.detached else source
        if (self.shape, self.stride, self.offset) == (source.shape, source.stride(), 0) and self.detached:
            return source
        return source.as_strided(self.shape, self.stride, source.storage_offset() + self.offset)
