"""Check that a batch may be split: each row of the result depends on its row alone, and scalars are means or sums.

    require_row_independence(module, args, kwargs, device)     BatchNorm in training, x - x.mean(0)   ->   CaptureError

Forward runs on a few rows, and again with each row changed: only that row of the result may change. Forward also runs
with each row repeated, and on as many rows as a micro-batch and the batch have: position and count must not matter.
No dimension has the number of rows, so a tensor that has as many rows as the batch by chance is found by its shape.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from passes import Machine, predict

from ..capture.capture import capture, operands
from ..errors import CaptureError
from ..graph.captured import Captured, Ref
from ..graph.nodes import changed_storages, returned_values, storages
from ..graph.summarize import summarize
from ..guards.module_proxy import ModuleProxy
from ..profile.memory_meter import measure_peak, resident_bytes
from ..report.tables import mb
from ..system.device import unused_nbytes
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
)  # fmt: skip

LOG = logging.getLogger(__name__)
Change = tuple[float, float]  # of the numbers in a row: factor and summand
SLIGHT: Change = (0.75, 0.125)
LARGE: Change = (100.0, 1.0)  # enough to become the largest of the batch


def require_row_independence(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None,
    room: int | None = None,
) -> None:  # fmt: skip
    """Raise if a call's batch may not be split.

    Args:
        device: the device on which a few rows may run, in half of what is free there; None to run nothing.
        room: bytes that the budget leaves for it. Sizes that take more are captured and not run, and if a few rows do,
            that is logged.

    Raises:
        CaptureError: the module changes buffers, rows depend on each other, or `reduction` does not fit a scalar.
    """
    if isinstance(module, MicroBatches):
        leaves, spec = flatten((args, kwargs))
        if len(microbatch_sizes(leaves, module._count)) > 1:
            most = unused_nbytes(device) // 2 if device is not None else 0
            RowIndependenceCheck(module, leaves, spec, most, most if room is None else min(most, room)).run()
    elif isinstance(module, ModuleProxy):
        kwargs = {key: value for key, value in kwargs.items() if key != "target"}
        require_row_independence(module._module, args, kwargs, device, room)


class RowIndependenceCheck:
    def __init__(self, module: MicroBatches, leaves: Sequence[Any], spec: Spec, most: int, room: int) -> None:
        self.module, self.leaves, self.spec, self.most, self.room = module, leaves, spec, most, room
        self.batch, self.sizes = batch_size(leaves), microbatch_sizes(leaves, module._count)
        self.few = _unused_size([*module.parameters(), *module.buffers(), *leaves])
        self.name = type(module._module).__name__
        self.times, self.beside = 1.0, 0  # of the forecast of forward; bytes of comparisons

    def run(self) -> None:
        few = self.few
        step, doubled = self._capture(few), self._capture(2 * few)
        self._refuse_writes(step)
        self._refuse_shapes(step, doubled)
        self._refuse_other_writes(step, doubled)
        if self._nbytes(doubled, 2 * few) > self.most:
            return
        if not self._log_excess(self._nbytes(doubled, 2 * few)):
            self._measure(step)
            self._log_excess(self._nbytes(doubled, 2 * few))
        self._refuse_dependent_rows(step)
        expected = self._outputs(step, range(few), draws=False)
        repeated = [_scalars(self._outputs(step, [row] * few, draws=False)) for row in range(few)]
        for size in sorted({few, 2 * few, *self.sizes, self.batch}):
            sized = {few: step, 2 * few: doubled}.get(size) or self._capture(size)
            if size in (few, 2 * few) or self._nbytes(sized, size) <= self.room:
                self._refuse_dependent_size(size, sized, expected, repeated)
            elif _ops(sized) != _ops(step):
                raise self._size_error(size)

    def _refuse_writes(self, step: Captured) -> None:
        graph = step.graph.graph
        changed = changed_storages(graph)
        for node, role in zip(graph.find_nodes(op="placeholder"), step.inputs, strict=True):
            if storages(node) & changed:
                raise CaptureError(
                    f"forward changes {role.label}, and would do so in each micro-batch, as batch norm does in "
                    f"training: {INSTEAD}, or a layer that keeps no statistics of batches"
                )

    def _refuse_other_writes(self, step: Captured, doubled: Captured) -> None:
        """Raise if what forward leaves in attributes depends on the number of rows."""
        others = step.writes.described ^ doubled.writes.described
        for write in (*step.writes.items, *doubled.writes.items):
            if any(text.startswith(f"{write.where} ") for text in others):
                raise CaptureError(
                    f"forward writes something to {write.where} that depends on the number of rows, and would do so in "
                    f"each micro-batch: return it, do it outside of forward, or {INSTEAD}"
                )

    def _refuse_shapes(self, step: Captured, doubled: Captured) -> None:
        """Raise if the structure depends on the number of rows, or an output only seems to have rows."""
        if step.spec != doubled.spec:
            raise CaptureError(f"{self.name} returns results of other forms for other numbers of rows: {INSTEAD}")
        for leaf, other in zip(step.leaves, doubled.leaves, strict=True):
            if not isinstance(leaf, Ref) or not isinstance(other, Ref):
                if leaf != other:
                    raise CaptureError(
                        f"{self.name} returns {leaf!r} for {self.few} rows and {other!r} for more: {INSTEAD}"
                    )
            elif leaf.is_number:
                raise CaptureError(
                    f"{self.name} returns a number that it reads from a tensor, and each micro-batch has another: "
                    f"return the tensor, or {INSTEAD}"
                )
            elif (shape := _shape(leaf, step)) == _shape(other, doubled) and {*self.sizes} == {*shape[:1]}:
                raise CaptureError(
                    f"{self.name} returns a tensor of shape {tuple(shape)}, whose first dimension is not that of "
                    f"the batch: return rows or scalars, or {INSTEAD}"
                )

    def _refuse_dependent_rows(self, step: Captured) -> None:
        """Raise if a row affects another row, or if its effect on a scalar depends on other rows."""
        rows = range(self.few)
        for change, draws in ((LARGE, False), (SLIGHT, True)):  # in turn, as results may be large
            before = self._outputs(step, rows, draws=draws)
            for row in rows:
                self._refuse_effect(row, before, self._outputs(step, rows, (row,), change, draws=draws))
        scalars = _scalars(before) if self.module._reduction else {}
        del before
        changes = [_scalars(self._outputs(step, rows, changed)) for changed in ((0,), (1,), (0, 1))]
        for place, scalar in scalars.items():
            first, second, both = (change[place] for change in changes)
            if not _is_close(scalar + both, first + second):
                raise self._reduction_error()

    def _refuse_effect(self, row: int, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """Raise if another row than the changed one differs."""
        for old, new in zip(before, after, strict=True):
            has_rows = old.shape[:1] == (self.few,)
            if has_rows and not (_is_equal(old[:row], new[:row]) and _is_equal(old[row + 1 :], new[row + 1 :])):
                raise CaptureError(
                    f"a row that {self.name} returns depends on other rows of the batch, as with batch norm in "
                    f"training or a mean over the batch: {INSTEAD}, or compute it outside of the module"
                )

    def _refuse_dependent_size(
        self, size: int, step: Captured, expected: Sequence[Tensor], repeated: Sequence[dict[int, Tensor]]
    ) -> None:
        """Raise if a row differs among `size` rows, or if a scalar is not the mean of those of its rows, repeated."""
        rows = [place % self.few for place in range(size)]
        outputs = self._outputs(step, rows, draws=False)
        if len(outputs) != len(expected):
            raise self._size_error(size)
        for i, (few, many) in enumerate(zip(expected, outputs, strict=True)):
            if few.shape[:1] == (self.few,):
                has_rows = many.shape == (size, *few.shape[1:])
                if not has_rows or not all(_is_close(few[: len(part)], part) for part in many.split(self.few)):
                    raise self._size_error(size)
            elif not few.dim() and self.module._reduction:
                mean = torch.stack([repeated[row][i] for row in rows]).sum(0) / self.few
                if many.dim() or not _is_close(mean, many):
                    raise self._reduction_error()

    def _size_error(self, size: int) -> CaptureError:
        return CaptureError(
            f"a row that {self.name} returns depends on how many rows there are, or where it stands among them "
            f"({self.few} rows compared with {size}): {INSTEAD}, or give positions as an argument with as many rows "
            "as the batch, and divide by the number of rows outside of the module"
        )

    def _reduction_error(self) -> CaptureError:
        reduction = self.module._reduction
        return CaptureError(
            f'reduction="{reduction}" was given, but the scalar that {self.name} returns is no {reduction} over the '
            "rows of the batch: compute it from the outputs of all rows (loss= without reduction=, or outside), "
            f"or {INSTEAD}"
        )

    def _measure(self, step: Captured) -> None:
        """Run a few rows, and see how much more that takes than forecast, and how much comparing results takes."""
        forecast = self._nbytes(step, self.few)
        device = next(leaf.device for leaf in self.leaves if is_batched(leaf, self.batch))
        outputs, forward = measure_peak(lambda: self._outputs(step, range(self.few), draws=False), device)
        _, comparison = measure_peak(lambda: [_is_close(each, each) for each in outputs], device)
        if forward is not None and forecast:
            self.times = max(1.0, forward.peak / forecast)
        self.beside = resident_bytes(outputs) + (comparison.peak if comparison is not None else 0)

    def _nbytes(self, step: Captured, size: int) -> int:
        """Return the bytes that running so many rows takes, with the rows and comparisons."""
        trace = summarize(step.graph.graph)
        rows = sum(leaf.nbytes for leaf in self.leaves if is_batched(leaf, self.batch)) * size // self.batch
        forward = predict(trace, Machine(0)).peak - sum(op.nbytes for op in trace.ops if op.is_input)
        return math.ceil(self.times * (forward + rows)) + self.beside

    def _log_excess(self, nbytes: int) -> bool:
        """Log that running a few rows exceeds the budget, if it does."""
        exceeds = nbytes > max(self.room, 0)
        if exceeds:
            LOG.warning(
                "planning goes beyond the budget: %d rows of %s are run to see whether a batch may be split, which "
                "takes %s, and the budget leaves %s for it", 2 * self.few, self.name, mb(nbytes), mb(max(self.room, 0)),
            )  # fmt: skip
        return exceeds

    def _capture(self, size: int) -> Captured:
        with self._explained(size):
            module = _SummedScalars(self.module._module, size, self.module._reduction)
            return capture(module, *self._first(size), grad=False)

    def _first(self, size: int) -> Any:
        """Return a call on so many rows for a capture: views of the first ones, as copies may exceed the budget.

        A tensor that shares memory or is not contiguous is copied, for the graph will run on copies.
        """
        owned = *self.module.parameters(), *self.module.buffers(), *self.leaves
        users = Counter(each.untyped_storage()._cdata for each in owned if isinstance(each, Tensor))

        def rows(leaf: Any) -> Any:
            if not is_batched(leaf, self.batch):
                return leaf
            if size > self.batch or not leaf.is_contiguous() or users[leaf.untyped_storage()._cdata] > 1:
                return _select(leaf, range(size), (), SLIGHT)
            return leaf.detach()[:size].requires_grad_(leaf.requires_grad)

        return unflatten(list(map(rows, self.leaves)), self.spec)

    def _call(self, rows: Sequence[int], changed: Sequence[int] = (), change: Change = SLIGHT) -> Any:
        leaves = [
            _select(leaf, rows, changed, change) if is_batched(leaf, self.batch) else leaf for leaf in self.leaves
        ]
        return unflatten(leaves, self.spec)

    def _outputs(
        self, step: Captured, rows: Sequence[int], changed: Sequence[int] = (), change: Change = SLIGHT,
        draws: bool = True,
    ) -> list[Tensor]:  # fmt: skip
        """Return the tensors for these rows, with the same random numbers each time, or their expected values."""
        args, kwargs = self._call(rows, changed, change)
        inputs = operands(self.module._module, args, kwargs)
        with torch.random.fork_rng(), torch.no_grad(), torch._C._DisableAutocast(), self._explained(len(rows)):
            torch.manual_seed(0)
            outputs = step.graph(*inputs) if draws else DeterministicInterpreter(step.graph).run(*inputs)
            return [leaf for leaf in flatten(step.result(step.fill(outputs, inputs)))[0] if isinstance(leaf, Tensor)]

    @contextmanager
    def _explained(self, size: int) -> Iterator[None]:
        try:
            yield
        except CaptureError:
            raise
        except Exception as error:
            batched = [i for i, leaf in enumerate(self.leaves) if is_batched(leaf, self.batch)]
            names = ", ".join(f"{i} {tuple(self.leaves[i].shape)} {self.leaves[i].dtype}" for i in batched)
            raise CaptureError(
                f"{self.name} can't run on {size} rows of its batch of {self.batch}. Every argument with as many rows "
                f"as the first is split, which are (counted in the order of the call) {names}: expand others, or "
                f"indices of rows, to another shape, or {INSTEAD}\n{error}"
            ) from error


class _SummedScalars(ModuleProxy):
    """A module whose scalars are sums over the rows, provided that they are what `reduction` says."""

    def __init__(self, module: nn.Module, rows: int, reduction: str | None) -> None:
        super().__init__(module)
        self.__dict__ |= {"_rows": rows, "_reduction": reduction}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with LossTargetCounter() as targets:
            part = MicroBatch.of(self._module(*args, **kwargs), self._rows, targets)
        pairs = zip(part.leaves, part.counts, strict=True)
        return unflatten([self._sum(leaf, number) for leaf, number in pairs], part.spec)

    def _sum(self, leaf: Any, number: Tensor | None) -> Any:
        if self._reduction != "mean" or not isinstance(leaf, Tensor) or leaf.dim():
            return leaf
        return leaf * self._rows if number is None else zero_if_empty(leaf, number) * number


def _shape(leaf: Ref, step: Captured) -> torch.Size:
    graph = step.graph.graph
    nodes = returned_values(graph) if leaf.kind == "output" else graph.find_nodes(op="placeholder")
    shape: torch.Size = leaf.of(nodes[leaf.index].meta["val"]).shape
    return shape


def _unused_size(values: Sequence[Any]) -> int:
    """Return an odd number from 5 on that is no dimension of a tensor."""
    sizes = {size for value in values if isinstance(value, Tensor) for size in value.shape}
    return next(number for number in count(5, 2) if number not in sizes)


def _scalars(outputs: Sequence[Tensor]) -> dict[int, Tensor]:
    return {place: output for place, output in enumerate(outputs) if not output.dim()}


def _ops(step: Captured) -> list[Any]:
    return [node.target for node in step.graph.graph.nodes if node.op == "call_function"]


def _select(leaf: Tensor, rows: Sequence[int], changed: Sequence[int], change: Change) -> Tensor:
    """Select rows of a tensor, modulo its length, and change some of them."""
    source = leaf.detach()
    selected = source.index_select(0, torch.tensor(rows, device=leaf.device) % len(leaf))
    for row in changed:
        following = source[(rows[row] + 1) % len(leaf)]
        selected[row] = selected[row] * change[0] + change[1] if selected.is_floating_point() else following
    return selected.requires_grad_(leaf.requires_grad)


def _is_equal(first: Tensor, second: Tensor) -> bool:
    if torch.equal(first, second) or not first.is_floating_point():
        return torch.equal(first, second)
    return bool(((first == second) | ((first != first) & (second != second))).all())


def _is_close(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors differ only by rounding, relative to the largest number in them."""
    if not first.is_floating_point():
        return _is_equal(first, second)
    # Indices of the finite numbers would take several times as many bytes as the numbers.
    largest = float(first.detach().where(first.isfinite(), 0.0).abs_().max()) if first.numel() else 0.0
    differs = (first - second).abs_().le(torch.finfo(first.dtype).eps ** 0.5 * (1.0 + largest)).logical_not_()
    return _is_equal(first[differs], second[differs])
