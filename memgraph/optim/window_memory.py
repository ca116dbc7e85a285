"""Say what an update in windows allocates, before it is run and before anything has moved.

AdamW over 50.0M parameters, all on disk, windows of 64.0 MB   ->   two windows 128.0 MB, temporaries 16.0 MB,
                                                                    states that the first update makes 64.0 MB
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
from .update_operands import ParameterPredicate
from .window_plan import Window, WindowChunk, WindowRow, plan_windows

SCALAR_NBYTES = 8  # bytes of a number that is one for all elements of a parameter, or less


@dataclass(frozen=True)
class OffloadedTensors:
    """Which parameters have their own bytes, their gradients and their states on disk, or will have."""

    parameters: ParameterPredicate
    gradients: ParameterPredicate
    states: ParameterPredicate


@dataclass(frozen=True)
class WindowBytes:
    """What one update allocates at most. All of it is freed but for states that are made and stay in memory."""

    windows: int  # two, for as long as the update takes
    passing: int  # temporaries of the optimizer's step on a window, and states that it made and that are on their way
    leaving: int  # the most of those that one window has made
    numbers: int  # of `passing`: states that are one for all elements, as handed to the windows that are under way

    @property
    def between(self) -> int:
        """What is there behind one parameter's update and before the next one's, if both windows move meanwhile."""
        return min(self.windows + 2 * self.leaving + self.numbers, self.total)

    @property
    def total(self) -> int:
        return self.windows + self.passing


@dataclass(frozen=True)
class WindowDraft:
    """A parameter as it will be in an update."""

    group: int
    row: WindowRow
    temporaries: Temporaries
    numbers: int  # states that are one for all its elements
    has_offloaded_states: bool

    def nbytes_of_numbers(self, chunk: WindowChunk) -> int:
        return 0 if chunk.whole else SCALAR_NBYTES * self.numbers

    def fresh(self, chunk: WindowChunk) -> int:
        return sum(chunk.count * itemsize for itemsize in self.row.created)


def window_bytes(
    optimizer: optim.Optimizer,
    nbytes: int,
    offloaded: OffloadedTensors,
    trained: Collection[Tensor] | None = None,
    separate: bool = False,
) -> tuple[WindowBytes, WindowBytes]:
    """Bytes of the next update and of any later one, in windows of `nbytes`; with `separate` each is of one parameter.

    All of `trained` have a gradient then, with the strides of its parameter; without it, all that require one.

    Raises:
        ValueError: the windows are too small for a chunk of some parameter.
    """
    sure = None if trained is None else set(map(id, trained))
    clone = ClonedOptimizer(optimizer)
    known: dict[tuple[int, torch.dtype], Temporaries] = {}
    now, later = [], []
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad if sure is None else id(parameter) in sure:
                kind = i, parameter.dtype
                if kind not in known:
                    known[kind] = clone.temporaries(*kind)
                entries, state = clone.state_dtypes(*kind), optimizer.state.get(parameter, {})
                numbers = sum(dtype is None for dtype in entries.values())
                rest = known[kind], numbers, offloaded.states(parameter)
                now.append(WindowDraft(i, _row(parameter, entries, state, offloaded), *rest))
                later.append(WindowDraft(i, _row(parameter, entries, None, offloaded), *rest))
    return _bytes(now, nbytes, separate), _bytes(later, nbytes, separate)


def _row(
    parameter: Tensor,
    entries: Mapping[str, torch.dtype | None],
    state: Mapping[str, Any] | None,
    offloaded: OffloadedTensors,
) -> WindowRow:
    """The parameter with the states that it has; None: with all of them."""
    tensors = [
        (parameter.dtype, offloaded.parameters(parameter) or buffer_slice_of(parameter) is not None),
        (parameter.dtype, offloaded.gradients(parameter)),
    ]
    fresh = []
    for key, dtype in entries.items():
        there = None if state is None else state.get(key)
        if dtype is not None and state is not None and there is None:
            fresh.append(dtype.itemsize)
        elif dtype is not None:
            tensors.append(
                (dtype, offloaded.states(parameter) or (there is not None and buffer_slice_of(there) is not None))
            )
    moved, resident = (tuple(dtype.itemsize for dtype, away in tensors if away is side) for side in (True, False))
    return WindowRow(parameter.numel(), moved, resident, tuple(fresh), is_exact(parameter))


def _bytes(drafts: Sequence[WindowDraft], nbytes: int, separate: bool) -> WindowBytes:
    windows = plan_windows([draft.row for draft in drafts], nbytes, separate=separate)

    def each(of: Callable[[WindowDraft, WindowChunk], int]) -> list[int]:
        return [sum(of(drafts[chunk.row], chunk) for chunk in window) for window in windows]

    slab = max(each(lambda draft, chunk: draft.row.buffer_nbytes(chunk.count)), default=0) * len(windows[:2])
    works = [_temporaries(drafts, window) for window in windows]
    made = each(lambda draft, chunk: draft.fresh(chunk) + draft.nbytes_of_numbers(chunk))
    # What the window before has made may still be on its way, and the next one has its numbers already.
    leaving = each(lambda draft, chunk: draft.fresh(chunk) if draft.has_offloaded_states else 0)
    numbers = each(lambda draft, chunk: draft.nbytes_of_numbers(chunk))
    beside = [before + after for before, after in zip([0, *numbers], [*numbers[1:], 0], strict=False)]
    passing = max(map(sum, zip(works, made, [0, *leaving], beside, strict=False)), default=0)
    handed = max(map(sum, zip(numbers, beside, strict=False)), default=0)
    tried = max((draft.temporaries.most([2]) + draft.row.nbytes(2) for draft in drafts), default=0)
    return WindowBytes(slab, max(passing, tried - slab), max(leaving, default=0), handed)


def _temporaries(drafts: Sequence[WindowDraft], window: Window) -> int:
    """What the optimizer's step on a window takes; it does group after group."""
    found = [0]
    for _, chunks in itertools.groupby(window, key=lambda chunk: drafts[chunk.row].group):
        run = list(chunks)
        kinds = {drafts[chunk.row].temporaries for chunk in run}
        # Where types are mixed, those of the most are assumed for all.
        found.append(max(kind.most([chunk.count for chunk in run]) for kind in kinds))
    return max(found)
