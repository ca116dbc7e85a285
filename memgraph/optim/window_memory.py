"""Forecast the bytes that an update in windows allocates, before it runs and before anything is offloaded.

AdamW over 50.0M parameters, all on disk, windows of 64.0 MB   ->   two windows 128.0 MB, temporaries 16.0 MB,
                                                                    states that the first update creates 64.0 MB
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from ..storage.mapped_storage import buffer_slice_of
from .elementwise import is_exact
from .optimizer_clone import ClonedOptimizer, Temporaries
from .optimizer_profiler import OptimizerProfiler, ParameterKind
from .update_operands import ParameterPredicate
from .window_plan import Window, WindowChunk, WindowRow, aligned, plan_windows

SCALAR_NBYTES = 8  # of a scalar state, or less


@dataclass(frozen=True)
class OffloadedTensors:
    """The parameters whose own bytes, gradients and states are offloaded, or will be."""

    parameters: ParameterPredicate
    gradients: ParameterPredicate
    states: ParameterPredicate


@dataclass(frozen=True)
class WindowBytes:
    """The most that one update allocates. All of it is freed except for states that are created and stay in memory."""

    windows: int  # two, for as long as the update takes
    temporary: int  # temporaries of the optimizer's step on a window, and states that are created and copied out
    created: int  # the most of these states that one window creates
    scalars: int  # of `temporary`: copies of scalar states for the windows that are in work

    @property
    def between(self) -> int:
        """The most that exists between the updates of two parameters, while both windows are copied."""
        return min(self.windows + 2 * self.created + self.scalars, self.total)

    @property
    def total(self) -> int:
        return self.windows + self.temporary


@dataclass(frozen=True)
class PlannedUpdate:
    """The coming update of one parameter."""

    group: int
    row: WindowRow
    temporaries: Temporaries
    scalars: int  # scalar states
    has_offloaded_states: bool

    def scalar_nbytes(self, chunk: WindowChunk) -> int:
        return 0 if chunk.whole else SCALAR_NBYTES * self.scalars

    def created_nbytes(self, chunk: WindowChunk) -> int:
        return sum(chunk.count * itemsize for itemsize in self.row.created)


def window_bytes(
    optimizer: optim.Optimizer, nbytes: int, offloaded: OffloadedTensors, trained: Collection[Tensor] | None = None,
    separate: bool = False, exact: ParameterPredicate = is_exact,
) -> tuple[WindowBytes, WindowBytes]:  # fmt: skip
    """Return the bytes of the next update and of any later one, in windows of `nbytes`.

    All of `trained`, or else all that require a gradient, have one then, with the strides of the parameter. With
    `separate` a window is of one parameter. One that is `exact` can be split anywhere.

    Raises:
        ValueError: the windows are too small for a chunk of some parameter.
    """
    sure = None if trained is None else set(map(id, trained))
    clone = ClonedOptimizer(optimizer)
    temporaries: dict[tuple[int, torch.dtype], Temporaries] = {}
    now, later = list[PlannedUpdate](), list[PlannedUpdate]()
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad if sure is None else id(parameter) in sure:
                kind = i, parameter.dtype
                if kind not in temporaries:
                    temporaries[kind] = clone.temporaries(*kind)
                dtypes, state = clone.state_dtypes(*kind), optimizer.state.get(parameter, {})
                scalars = sum(dtype is None for dtype in dtypes.values())
                rest = temporaries[kind], scalars, offloaded.states(parameter)
                rows = (_row(parameter, dtypes, each, offloaded, exact(parameter)) for each in (state, None))
                for updates, row in zip((now, later), rows, strict=True):
                    updates.append(PlannedUpdate(i, row, *rest))
    return _bytes(now, nbytes, separate), _bytes(later, nbytes, separate)


def whole_bytes(optimizer: optim.Optimizer, offloaded: ParameterPredicate, trained: Collection[Tensor]) -> WindowBytes:
    """Return the bytes of an update of `trained` parameters, one at a time, if all of these are `offloaded`."""
    profiler, sure = OptimizerProfiler(optimizer), frozenset(map(id, trained))
    rows = [[p for p in group["params"] if id(p) in sure] for group in optimizer.param_groups]
    moved = [(i, p) for i, row in enumerate(rows) for p in row if offloaded(p)]
    states = [[spec.nbytes for spec in profiler.layouts(ParameterKind.of(*each)).values()] for each in moved]
    windows = [sum(map(aligned, (p.nbytes, p.nbytes, *sizes))) for (_, p), sizes in zip(moved, states, strict=True)]
    created = max(map(sum, states), default=0)
    return WindowBytes(max(windows, default=0) * len(windows[:2]), profiler.workspace(rows, sure), created, 0)


def _row(
    parameter: Tensor, dtypes: Mapping[str, torch.dtype | None], state: Mapping[str, Any] | None,
    offloaded: OffloadedTensors, exact: bool,
) -> WindowRow:  # fmt: skip
    """The parameter with its existing states; None: with all of them."""
    tensors = [
        (parameter.dtype, offloaded.parameters(parameter) or buffer_slice_of(parameter) is not None),
        (parameter.dtype, offloaded.gradients(parameter)),
    ]
    created = []
    for key, dtype in dtypes.items():
        existing = None if state is None else state.get(key)
        if dtype is not None and state is not None and existing is None:
            created.append(dtype.itemsize)
        elif dtype is not None:
            is_mapped = existing is not None and buffer_slice_of(existing) is not None
            tensors.append((dtype, offloaded.states(parameter) or is_mapped))
    buffered, resident = (
        tuple(dtype.itemsize for dtype, is_offloaded in tensors if is_offloaded is side) for side in (True, False)
    )
    return WindowRow(parameter.numel(), buffered, resident, tuple(created), exact)


def _bytes(updates: Sequence[PlannedUpdate], nbytes: int, separate: bool) -> WindowBytes:
    windows = plan_windows([update.row for update in updates], nbytes, separate=separate)

    def of_windows(of_chunk: Callable[[PlannedUpdate, WindowChunk], int]) -> list[int]:
        return [sum(of_chunk(updates[chunk.row], chunk) for chunk in window) for window in windows]

    buffers = of_windows(lambda update, chunk: update.row.buffer_nbytes(chunk.count))
    both = max(buffers, default=0) * len(windows[:2])
    temporaries = [_temporaries(updates, window) for window in windows]
    results = of_windows(lambda update, chunk: update.created_nbytes(chunk) + update.scalar_nbytes(chunk))
    # States that the window before has created may still be copied out, and the next one has its scalars already.
    created = of_windows(lambda update, chunk: update.created_nbytes(chunk) if update.has_offloaded_states else 0)
    scalars = of_windows(lambda update, chunk: update.scalar_nbytes(chunk))
    neighbours = [before + after for before, after in zip([0, *scalars], [*scalars[1:], 0], strict=False)]
    temporary = max(map(sum, zip(temporaries, results, [0, *created], neighbours, strict=False)), default=0)
    copied_scalars = max(map(sum, zip(scalars, neighbours, strict=False)), default=0)
    sample = max((update.temporaries.most([2]) + update.row.nbytes(2) for update in updates), default=0)
    return WindowBytes(both, max(temporary, sample - both), max(created, default=0), copied_scalars)


def _temporaries(updates: Sequence[PlannedUpdate], window: Window) -> int:
    """Bytes that the optimizer's step on a window allocates, group after group."""
    of_groups = [0]
    for _, group in itertools.groupby(window, key=lambda chunk: updates[chunk.row].group):
        chunks = list(group)
        kinds = {updates[chunk.row].temporaries for chunk in chunks}
        # Where types are mixed, the largest temporaries are assumed for all.
        of_groups.append(max(kind.most([chunk.count for chunk in chunks]) for kind in kinds))
    return max(of_groups)
