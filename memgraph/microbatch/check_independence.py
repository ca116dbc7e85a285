"""Whether a batch may be cut: what is returned for a row may depend on that row alone, and a scalar is a mean or a sum.

    refuse_mixing(module, args, kwargs, room)      BatchNorm in training, x - x.mean(0), ...   ->   CaptureError

A few rows of the batch go through forward, and again with each of them changed in turn: nothing else of the result may
change then.  Their number is one that no dimension has, so that a tensor with as many rows as the batch by accident is
found out by its shape.  They go through once more twice each, and as often as fills a part and the whole batch: a row
has to give the same wherever it stands, and among however many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from passes import Machine, predict

from ..capture.capture import Ref, capture, operands
from ..errors import CaptureError
from ..graph.captured import Captured
from ..graph.nodes import changed_storages, returned_values, storages
from ..graph.summarize import summarize
from ..guards.module_proxy import ModuleProxy
from ..tensors.pytree import Spec, flatten, unflatten
from .deterministic_interpreter import DeterministicInterpreter
from .microbatches import (
    INSTEAD,
    LossTargetCounter,
    MicroBatch,
    MicroBatches,
    batch_size,
    is_batched,
    microbatch_sizes,
    zero_if_empty,
)

RowChange = tuple[float, float]  # of the numbers in a row: a factor, and what is added
SLIGHT: RowChange = (0.75, 0.125)
LARGE: RowChange = (100.0, 1.0)  # enough to become the largest of the batch


def require_row_independence(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], room: int) -> None:
    """Raise if a call's batch may not be cut.  It is tried only if that takes no more than `room` bytes.

    Raises:
        CaptureError: the module changes buffers, its rows depend on each other, or a scalar is not what was said of it.
    """
    if not isinstance(module, MicroBatches):
        if isinstance(module, ModuleProxy):
            require_row_independence(
                module._module, args, {key: kwargs[key] for key in kwargs if key != "target"}, room
            )
        return
    leaves, spec = flatten((args, kwargs))
    if len(microbatch_sizes(leaves, module._count)) > 1:
        RowIndependenceCheck(module, leaves, spec, room).run()


class RowIndependenceCheck:
    """Forward of the plain module, on a few rows."""

    def __init__(self, module: MicroBatches, leaves: Sequence[Any], spec: Spec, room: int) -> None:
        self.module, self.leaves, self.spec, self.room = module, leaves, spec, room
        self.rows = batch_size(leaves)
        self.few = _unlike([*module.parameters(), *module.buffers(), *leaves])

    def run(self) -> None:
        few = self.few
        captured, doubled = self._captured(few), self._captured(2 * few)
        self._refuse_changes(captured)
        self._refuse_forms(captured, doubled)
        if not self._fits(doubled):
            return
        self._refuse_dependent(captured)
        plain = self._outputs(captured, range(few), chance=False)
        alike = [_scalars(self._outputs(captured, [row] * few, chance=False)) for row in range(few)]
        for size in sorted({few, 2 * few, *microbatch_sizes(self.leaves, self.module._count), self.rows}):
            self._refuse_counted(size, captured, plain, alike)

    def _fits(self, captured: Captured) -> bool:
        trace = summarize(captured.graph.graph)
        given = sum(op.nbytes for op in trace.ops if op.is_input)
        return predict(trace, Machine(0)).peak - given <= self.room

    def _refuse_dependent(self, captured: Captured) -> None:
        """Raise if another row changes a row, or what it changes of a scalar depends on other rows."""
        few = range(self.few)
        plain, calm = (self._outputs(captured, few, chance=chance) for chance in (True, False))
        for row in few:
            self._refuse_seen(row, plain, self._outputs(captured, few, (row,)))
            self._refuse_seen(row, calm, self._outputs(captured, few, (row,), LARGE, chance=False))
        first, second, both = (self._outputs(captured, few, changed) for changed in ((0,), (1,), (0, 1)))
        for zero, one, two, three in zip(plain, first, second, both, strict=True):
            if not zero.dim() and self.module._reduction and not _near(zero + three, one + two):
                raise self._no_reduction()

    def _refuse_seen(self, row: int, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """Raise if more is different than the row that was changed."""
        for zero, one in zip(before, after, strict=True):
            is_rows = zero.shape[:1] == (self.few,)
            if is_rows and not (_same(zero[:row], one[:row]) and _same(zero[row + 1 :], one[row + 1 :])):
                raise CaptureError(
                    f"what {self._name()} returns for a row of the batch depends on other rows, as with batch norm in "
                    f"training or a mean over the batch: {INSTEAD}, or compute it outside of the module"
                )

    def _refuse_counted(
        self, size: int, captured: Captured, plain: Sequence[Tensor], alike: Sequence[dict[int, Tensor]]
    ) -> None:
        """Raise if among so many rows one is another, or a scalar is no sum of what its rows would make alone."""
        sized = captured if size == self.few else self._captured(size)
        if not self._fits(sized):
            if _ops(sized) != _ops(captured):
                raise self._counts(size)
            return
        rows = [place % self.few for place in range(size)]
        found = self._outputs(sized, rows, chance=False)
        if len(found) != len(plain):
            raise self._counts(size)
        for i, (one, other) in enumerate(zip(plain, found, strict=True)):
            if one.shape[:1] == (self.few,):
                shaped = other.shape == (size, *one.shape[1:])
                if not shaped or not all(_near(one[: len(some)], some) for some in other.split(self.few)):
                    raise self._counts(size)
            elif not one.dim() and self.module._reduction:
                alone = torch.stack([alike[row][i] for row in rows]).sum(0) / self.few
                if other.dim() or not _near(alone, other):
                    raise self._no_reduction()

    def _counts(self, size: int) -> CaptureError:
        return CaptureError(
            f"what {self._name()} returns for a row of the batch depends on how many rows there are, or where it "
            f"stands among them ({self.few} rows compared with {size}): {INSTEAD}, or give positions as an argument "
            "with as many rows as the batch, and divide by the number of rows outside of the module"
        )

    def _name(self) -> str:
        return type(self.module._module).__name__

    def _captured(self, size: int) -> Captured:
        with self._running(size):
            module = _Sums(self.module._module, size, self.module._reduction)
            return capture(module, *self._call(range(size)), grad=False)

    def _call(
        self, rows: Sequence[int], changed: Sequence[int] = (), by: RowChange = SLIGHT
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = [_some(leaf, rows, changed, by) if is_batched(leaf, self.rows) else leaf for leaf in self.leaves]
        found: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(leaves, self.spec)
        return found

    def _outputs(
        self,
        captured: Captured,
        rows: Sequence[int],
        changed: Sequence[int] = (),
        by: RowChange = SLIGHT,
        chance: bool = True,
    ) -> list[Tensor]:
        """The tensors returned for these rows, of which some are changed; what is drawn is the same each time."""
        tensors = operands(self.module._module, *self._call(rows, changed, by))
        with torch.random.fork_rng(), torch.no_grad(), torch._C._DisableAutocast(), self._running(len(rows)):
            torch.manual_seed(0)
            outputs = captured.graph(*tensors) if chance else DeterministicInterpreter(captured.graph).run(*tensors)
            return [leaf for leaf in flatten(captured.result(outputs, tensors))[0] if isinstance(leaf, Tensor)]

    @contextmanager
    def _running(self, size: int) -> Iterator[None]:
        """Explains why fewer or more rows can't be run."""
        try:
            yield
        except CaptureError:
            raise
        except Exception as error:
            cut = [i for i, leaf in enumerate(self.leaves) if is_batched(leaf, self.rows)]
            names = ", ".join(f"{i} {tuple(self.leaves[i].shape)} {self.leaves[i].dtype}" for i in cut)
            raise CaptureError(
                f"{self._name()} can't run on {size} rows of its batch of {self.rows}: of its arguments those are cut "
                f"that have as many rows as the first, which are (counted in the order of the call) {names}; expand "
                f"others, or indices of rows, to another shape, or {INSTEAD}\n{error}"
            ) from error

    def _refuse_changes(self, captured: Captured) -> None:
        graph = captured.graph.graph
        changed = changed_storages(graph)
        for node, role in zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True):
            if storages(node) & changed:
                raise CaptureError(
                    f"forward changes {role.label}, which each micro-batch would do anew, as batch norm does in "
                    f"training: {INSTEAD}, or a layer that keeps no statistics of batches"
                )

    def _refuse_forms(self, captured: Captured, doubled: Captured) -> None:
        """Raise if the result has another form for other rows, or an output that has no rows looks as if it had."""
        counts = set(microbatch_sizes(self.leaves, self.module._count))
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


class _Sums(ModuleProxy):
    """A module whose scalars are sums over the rows, if they are what `reduction` says."""

    def __init__(self, module: nn.Module, rows: int, reduction: str | None) -> None:
        super().__init__(module)
        self.__dict__ |= {"_rows": rows, "_reduction": reduction}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with LossTargetCounter() as targets:
            part = MicroBatch.of(self._module(*args, **kwargs), self._rows, targets)
        pairs = zip(part.leaves, part.counts, strict=True)
        return unflatten([self._sum(leaf, count) for leaf, count in pairs], part.spec)

    def _sum(self, leaf: Any, count: Tensor | None) -> Any:
        if self._reduction != "mean" or not isinstance(leaf, Tensor) or leaf.dim():
            return leaf
        return leaf * self._rows if count is None else zero_if_empty(leaf, count) * count


def _shape(leaf: Ref, captured: Captured) -> torch.Size:
    graph = captured.graph.graph
    nodes = returned_values(graph) if leaf.kind == "output" else graph.find_nodes(op="placeholder")
    shape: torch.Size = leaf.of(nodes[leaf.index].meta["val"]).shape
    return shape


def _unlike(things: Sequence[Any]) -> int:
    """The smallest number that is no dimension of these tensors, and none that a module is likely to be about."""
    sizes = {size for thing in things if isinstance(thing, Tensor) for size in thing.shape}
    return next(number for number in count(5, 2) if number not in sizes)


def _scalars(outputs: Sequence[Tensor]) -> dict[int, Tensor]:
    return {place: output for place, output in enumerate(outputs) if not output.dim()}


def _ops(captured: Captured) -> list[Any]:
    return [node.target for node in captured.graph.graph.nodes if node.op == "call_function"]


def _some(leaf: Tensor, rows: Sequence[int], changed: Sequence[int], by: RowChange) -> Tensor:
    """These rows of a tensor, from the beginning again behind its last; those `changed` are others."""
    before = leaf.detach()
    found = before.index_select(0, torch.tensor(rows, device=leaf.device) % len(leaf))
    for row in changed:
        following = before[(rows[row] + 1) % len(leaf)]
        found[row] = found[row] * by[0] + by[1] if found.is_floating_point() else following
    return found.requires_grad_(leaf.requires_grad)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _near(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same but for rounding of what is as large as the largest of them."""
    if not one.is_floating_point():
        return _same(one, other)
    finite = one.detach()[one.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    away = ~(one - other).abs().le(torch.finfo(one.dtype).eps ** 0.5 * (1.0 + largest))
    return _same(one[away], other[away])
