"""Forecast the bytes that an update in windows allocates, before it runs and before anything is offloaded.

AdamW over 50.0M parameters, all on disk, windows of 64.0 MB   ->   two windows 128.0 MB, temporaries 16.0 MB,
                                                                    states that the first update creates 64.0 MB
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, optim

from ..storage.mapped_storage import Layouts, TensorSpec, buffer_slice_of
from ..tensors.state_leaves import state_leaves
from .elementwise import is_exact
from .optimizer_profiler import UNLIMITED, OptimizerProfiler, uses_foreach
from .parameter_kind import ParameterKind
from .trial_copy import SAMPLE_ELEMENTS
from .update_operands import ParameterPredicate, chunked_layouts
from .window_plan import Window, WindowChunk, WindowRow, plan_windows


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

    @property
    def between(self) -> int:
        """The most that exists between the updates of two parameters, while both windows are copied."""
        return min(self.windows + 2 * self.created, self.total)

    @property
    def total(self) -> int:
        return self.windows + self.temporary


@dataclass(frozen=True)
class Temporaries:
    """Bytes that an update allocates and frees.

    There are `fixed` ones for each parameter, `each` for an element of it, and `before` for an element of the parameter
    before it, which stay until they are replaced.
    """

    fixed: int
    each: float
    before: float
    together: bool  # all parameters of the group at once

    @classmethod
    def of(cls, profiler: OptimizerProfiler, kind: ParameterKind, whole: bool) -> Temporaries:
        """Measure them on few elements, which tell of any number; a parameter that is not cut is one."""
        if whole:
            return cls(0, profiler.update_workspace(kind), 0.0, False)
        counts = (SAMPLE_ELEMENTS,), (2 * SAMPLE_ELEMENTS,), (SAMPLE_ELEMENTS,) * 2
        one, large, two = (profiler.update_workspace(*(replace(kind, shape=(n,)) for n in row)) for row in counts)
        fixed, each = max(0, 2 * one - large), (large - one) / SAMPLE_ELEMENTS
        # The fixed ones may be gone when the tensors of two parameters meet.
        before = min(each, max(0, two - one + fixed) / SAMPLE_ELEMENTS)
        return cls(fixed, each, before, uses_foreach(profiler.optimizer.param_groups[kind.group], kind.device))

    def most(self, counts: Sequence[int]) -> int:
        """Return the most that an update of parameters with so many elements takes, in this order."""
        if self.together:
            return sum(self.fixed + math.ceil(self.each * count) for count in counts)
        pairs = [sorted(pair) for pair in itertools.pairwise([0, *counts])]
        return max(
            (2 * self.fixed + math.ceil(self.each * large + self.before * small) for small, large in pairs), default=0
        )


@dataclass(frozen=True)
class PlannedUpdate:
    """The coming update of one parameter."""

    group: int
    row: WindowRow
    temporaries: Temporaries
    scalars: int  # bytes of scalar states
    has_offloaded_states: bool

    def scalar_nbytes(self, chunk: WindowChunk) -> int:
        return 0 if chunk.whole else self.scalars

    def created_nbytes(self, chunk: WindowChunk) -> int:
        return sum(chunk.count * itemsize for itemsize in self.row.created)


def window_bytes(
    optimizer: optim.Optimizer, nbytes: int, offloaded: OffloadedTensors, trained: Collection[Tensor] | None = None,
    separate: bool = False, exact: ParameterPredicate = is_exact, whole: bool = False,
) -> tuple[WindowBytes, WindowBytes]:  # fmt: skip
    """Return the bytes of the next update and of any later one, in windows of `nbytes`.

    All of `trained`, or else all that require a gradient, have one then, with the strides of the parameter. With
    `separate` a window is of one parameter, and with `whole` it is one. One that is `exact` can be split anywhere.

    Raises:
        ValueError: the windows are too small for a chunk of some parameter.
    """
    sure = None if trained is None else set(map(id, trained))
    profiler = OptimizerProfiler(optimizer)
    temporaries: dict[object, Temporaries] = {}
    now, later = list[PlannedUpdate](), list[PlannedUpdate]()
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad if sure is None else id(parameter) in sure:
                kind = ParameterKind.of(i, parameter)
                alike = kind if whole else (i, kind.dtype)
                if alike not in temporaries:
                    temporaries[alike] = Temporaries.of(profiler, kind, whole)
                layouts = chunked_layouts(parameter, profiler.layouts(kind), whole)
                scalars, is_offloaded = profiler.scalars_nbytes(kind), offloaded.states(parameter)
                for updates, state in ((now, optimizer.state.get(parameter, {})), (later, None)):
                    row = _row(parameter, layouts, state, offloaded, whole)
                    row = replace(row, exact=exact(parameter) and not whole)
                    updates.append(PlannedUpdate(i, row, temporaries[alike], scalars, is_offloaded))
    size, separate = (UNLIMITED, True) if whole else (nbytes, separate)
    return _bytes(now, size, separate), _bytes(later, size, separate)


def _row(
    parameter: Tensor, layouts: Layouts, state: Mapping[str, Any] | None, offloaded: OffloadedTensors, whole: bool
) -> WindowRow:
    """The parameter with its existing states; None: with all of them."""
    existing = {leaf.name: leaf.tensor for leaf in state_leaves(state or {})}
    missing = [] if state is None else [name for name in layouts if name not in existing]

    def is_mapped(name: str) -> bool:
        return offloaded.states(parameter) or (name in existing and buffer_slice_of(existing[name]) is not None)

    tensors: list[tuple[Tensor | TensorSpec, bool]] = [
        (parameter, offloaded.parameters(parameter) or buffer_slice_of(parameter) is not None),
        (parameter, offloaded.gradients(parameter)),
        *((spec, is_mapped(name)) for name, spec in layouts.items() if name not in missing),
    ]
    buffered, resident = (
        tuple(_unit_nbytes(each, whole) for each, is_offloaded in tensors if is_offloaded is side)
        for side in (True, False)
    )
    created = tuple(_unit_nbytes(layouts[name], whole) for name in missing)
    return WindowRow(1 if whole else parameter.numel(), buffered, resident, created)


def _unit_nbytes(tensor: Tensor | TensorSpec, whole: bool) -> int:
    """Return the bytes of a tensor, or of an element of it."""
    return tensor.nbytes if whole else tensor.dtype.itemsize


def _bytes(updates: Sequence[PlannedUpdate], nbytes: int, separate: bool) -> WindowBytes:
    windows = plan_windows([update.row for update in updates], nbytes, separate=separate)

    def of_windows(of_chunk: Callable[[PlannedUpdate, WindowChunk], int]) -> list[int]:
        return [sum(of_chunk(updates[chunk.row], chunk) for chunk in window) for window in windows]

    buffers = of_windows(lambda update, chunk: update.row.buffer_nbytes(chunk.count))
    both = max(buffers, default=0) * len(windows[:2])
    temporaries = [_temporaries(updates, window) for window in windows]
    # Numbers are there three times at most.  Steps of fused kernels were seen to take 4 bytes more; why is not known.
    results = of_windows(lambda update, chunk: update.created_nbytes(chunk) + 3 * update.scalar_nbytes(chunk) + 4)
    # States that the window before has created may still be copied out.
    created = of_windows(lambda update, chunk: update.created_nbytes(chunk) if update.has_offloaded_states else 0)
    each = zip(temporaries, results, [0, *created], strict=False)
    return WindowBytes(both, max(map(sum, each), default=0), max(created, default=0))


def _temporaries(updates: Sequence[PlannedUpdate], window: Window) -> int:
    """Bytes that the optimizer's step on a window allocates, group after group."""
    of_groups = [0]
    for _, group in itertools.groupby(window, key=lambda chunk: updates[chunk.row].group):
        chunks = list(group)
        kinds = {updates[chunk.row].temporaries for chunk in chunks}
        # Where types are mixed, the largest temporaries are assumed for all.
        of_groups.append(max(kind.most([chunk.count for chunk in chunks]) for kind in kinds))
    return max(of_groups)
