"""Whether a batch may be cut: what is returned for a row may depend on that row alone, and a scalar is a mean or a sum.

    refuse_mixing(module, args, kwargs, room)      BatchNorm in training, x - x.mean(0), ...   ->   CaptureError

A few rows of the batch go through forward, once more with one of them changed, and once more twice each: nothing else
of the result may change then.  Their number is one that no dimension has, so that a tensor with as many rows as the
batch by accident is found out by its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from passes import Machine, predict

from .capture import Captured, Ref, capture, operands
from .errors import CaptureError
from .microbatches import INSTEAD, MicroBatches, Part, is_cut, known, parts_of, rows_of
from .nodes import changes_inputs, returned
from .shared import Shared
from .summarize import draws, summarize
from .targets import Targets
from .trees import Spec, flatten, unflatten


def refuse_mixing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], room: int) -> None:
    """Raise if a call's batch may not be cut.  It is tried only if that takes no more than `room` bytes.

    Raises:
        CaptureError: the module changes buffers, its rows depend on each other, or a scalar is not what was said of it.
    """
    if not isinstance(module, MicroBatches):
        if isinstance(module, Shared):
            refuse_mixing(module._module, args, {key: kwargs[key] for key in kwargs if key != "target"}, room)
        return
    leaves, spec = flatten((args, kwargs))
    if len(parts_of(leaves, module._count)) > 1:
        _Trial(module, leaves, spec, room).run()


class _Trial:
    """Forward of the plain module, on a few rows."""

    def __init__(self, module: MicroBatches, leaves: Sequence[Any], spec: Spec, room: int) -> None:
        self.module, self.leaves, self.spec, self.room = module, leaves, spec, room
        self.rows = rows_of(leaves)
        self.few = _unlike([*module.parameters(), *module.buffers(), *leaves])

    def run(self) -> None:
        few = range(self.few)
        captured, doubled = self._captured(few), self._captured([*few, *few])
        self._refuse_changes(captured)
        self._refuse_forms(captured, doubled)
        trace = summarize(doubled.graph.graph)
        given = sum(op.nbytes for op in trace.ops if op.is_input)
        if predict(trace, Machine(0)).peak - given > self.room:
            return
        plain = self._outputs(captured, few)
        self._refuse_dependent(captured, plain)
        if not any(map(draws, captured.graph.graph.nodes)):
            self._refuse_counted(captured, plain, self._outputs(doubled, [*few, *few]))

    def _refuse_dependent(self, captured: Captured, plain: Sequence[Tensor]) -> None:
        """Raise if another row changes a row, or what it changes of a scalar depends on other rows."""
        few = range(self.few)
        first, second, both = (self._outputs(captured, few, changed) for changed in ((0,), (1,), (0, 1)))
        for zero, one, two, three in zip(plain, first, second, both, strict=True):
            if zero.shape[:1] == (self.few,) and not _same(zero[1:], one[1:]):
                raise CaptureError(
                    f"what {self._name()} returns for a row of the batch depends on other rows, as with batch norm in "
                    f"training or a mean over the batch: {INSTEAD}, or compute it outside of the module"
                )
            if not zero.dim() and self.module._reduction and not _near(zero + three, one + two):
                raise self._no_reduction()

    def _refuse_counted(self, captured: Captured, plain: Sequence[Tensor], twice: Sequence[Tensor]) -> None:
        """Raise if a row depends on how many there are, or a scalar is no sum of what its rows would make alone."""
        alike = [self._outputs(captured, [row] * self.few) for row in range(self.few)]
        for i, one in enumerate(plain):
            mean = torch.stack([outputs[i] for outputs in alike]).sum(0) / self.few
            if not one.dim() and self.module._reduction and not (_near(one, mean) and _near(one * 2, twice[i])):
                raise self._no_reduction()
            if one.is_floating_point() and one.shape[:1] == (self.few,) and not _near(one, twice[i][: self.few]):
                raise CaptureError(
                    f"what {self._name()} returns for a row of the batch depends on how many rows there are: "
                    f"{INSTEAD}, or divide by their number outside of the module"
                )

    def _name(self) -> str:
        return type(self.module._module).__name__

    def _captured(self, rows: Sequence[int]) -> Captured:
        try:
            module = _Sums(self.module._module, len(rows), self.module._reduction)
            return capture(module, *self._call(rows), grad=False)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{self._name()} can't run on {len(rows)} rows of its batch of {self.rows}: of its arguments those are "
                f"cut that have as many rows as the first; expand others to another shape, or {INSTEAD}\n{error}"
            ) from error

    def _call(self, rows: Sequence[int], changed: Sequence[int] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = [_some(leaf, rows, changed) if is_cut(leaf, self.rows) else leaf for leaf in self.leaves]
        found: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(leaves, self.spec)
        return found

    def _outputs(self, captured: Captured, rows: Sequence[int], changed: Sequence[int] = ()) -> list[Tensor]:
        """The outputs for these rows, of which some are changed; random numbers are the same each time."""
        tensors = operands(self.module._module, *self._call(rows, changed))
        with torch.random.fork_rng(), torch.no_grad(), torch._C._DisableAutocast():
            torch.manual_seed(0)
            views = [leaf for leaf in captured.leaves if isinstance(leaf, Ref) and leaf.view is not None]
            return [*captured.graph(*tensors), *(leaf.of(tensors[leaf.index]) for leaf in views)]

    def _refuse_changes(self, captured: Captured) -> None:
        graph = captured.graph.graph
        changed = {node.args[0] for node in graph.nodes if changes_inputs(node)}
        for node, role in zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True):
            if node in changed:
                raise CaptureError(
                    f"forward changes {role.label}, which each micro-batch would do anew, as batch norm does in "
                    f"training: {INSTEAD}, or a layer that keeps no statistics of batches"
                )

    def _refuse_forms(self, captured: Captured, doubled: Captured) -> None:
        """Raise if the result has another form for other rows, or an output that has no rows looks as if it had."""
        counts = set(parts_of(self.leaves, self.module._count))
        if captured.spec != doubled.spec:
            raise CaptureError(f"{self._name()} returns results of other forms for other numbers of rows: {INSTEAD}")
        for one, two in zip(captured.leaves, doubled.leaves, strict=True):
            if not isinstance(one, Ref) or not isinstance(two, Ref):
                if one != two:
                    raise CaptureError(
                        f"{self._name()} returns {one!r} for {self.few} rows and {two!r} for more: {INSTEAD}"
                    )
            elif (shape := _shape(one, captured)) == _shape(two, doubled) and counts == {*shape[:1]}:
                raise CaptureError(
                    f"{self._name()} returns a tensor of shape {tuple(shape)}, whose first dimension is not that of "
                    f"the batch: return rows or scalars, or {INSTEAD}"
                )

    def _no_reduction(self) -> CaptureError:
        return CaptureError(
            f'reduction="{self.module._reduction}" was given, but the scalar that {self._name()} returns is no '
            f"{self.module._reduction} over the rows of the batch: compute it from the outputs of all rows (loss= "
            f"without reduction=, or outside), or {INSTEAD}"
        )


class _Sums(Shared):
    """A module whose scalars are sums over the rows, if they are what `reduction` says."""

    def __init__(self, module: nn.Module, rows: int, reduction: str | None) -> None:
        super().__init__(module)
        self.__dict__ |= {"_rows": rows, "_reduction": reduction}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with Targets() as targets:
            part = Part.of(self._module(*args, **kwargs), self._rows, targets)
        pairs = zip(part.leaves, part.counts, strict=True)
        return unflatten([self._sum(leaf, count) for leaf, count in pairs], part.spec)

    def _sum(self, leaf: Any, count: Tensor | None) -> Any:
        if self._reduction != "mean" or not isinstance(leaf, Tensor) or leaf.dim():
            return leaf
        return leaf * self._rows if count is None else known(leaf, count) * count


def _shape(leaf: Ref, captured: Captured) -> torch.Size:
    graph = captured.graph.graph
    nodes = returned(graph) if leaf.kind == "output" else graph.find_nodes(op="placeholder")
    shape: torch.Size = leaf.of(nodes[leaf.index].meta["val"]).shape
    return shape


def _unlike(things: Sequence[Any]) -> int:
    """The smallest number that is no dimension of these tensors, and none that a module is likely to be about."""
    sizes = {size for thing in things if isinstance(thing, Tensor) for size in thing.shape}
    return next(number for number in count(5, 2) if number not in sizes)


def _some(leaf: Tensor, rows: Sequence[int], changed: Sequence[int]) -> Tensor:
    """These rows of a tensor, from the beginning again behind its last; those `changed` are others."""
    before = leaf.detach()
    found = before.index_select(0, torch.tensor(rows, device=leaf.device) % len(leaf))
    for row in changed:
        found[row] = before[row] * 0.75 + 0.125 if found.is_floating_point() else before[(row + 1) % len(leaf)]
    return found.requires_grad_(leaf.requires_grad)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _near(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same but for rounding of what is as large as the largest of them."""
    if not one.is_floating_point():
        return _same(one, other)
    finite = one[one.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    away = ~(one - other).abs().le(torch.finfo(one.dtype).eps ** 0.5 * (1.0 + largest))
    return _same(one[away], other[away])
