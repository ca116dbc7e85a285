"""Step a copy of an optimizer on made-up parameters, to measure its states and its update.

    AdamW over 25.3M parameters  ->  states 202.4 MB, workspace of the update 8.4 MB
    f32[1024, 256] of them       ->  310 us for its update alone

It steps on one parameter of each kind (group, shape, dtype, device), and on consecutive pairs where two may take more
than one, so that no optimizer is modelled here.  Large parameters are fakes, where fakes of small ones take what real
ones do.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..capture.constant_fake_mode import ConstantFakeMode
from ..errors import UpdateError
from ..guards.signature import kernel_modes
from ..profile.memory_meter import measure_peak, resident_bytes
from ..storage.mapped_storage import Layouts, tensor_spec_of
from ..system.device import CPU
from ..system.measurement_cache import measure_once
from ..system.profiler_thread import run_unprofiled
from ..system.setting import environment_key
from ..system.timer import flush_caches, shortest_us
from ..tensors.parameter_groups import option_tensors, state_tensors
from ..tensors.state_leaves import is_movable, state_leaves
from .elementwise import ELEMENTWISE, is_elementwise
from .fake_step import FakeStep, fake_step
from .optimizer_clone import (
    SAMPLE_ELEMENTS,
    clone_nbytes,
    distinct_steps,
    initial_state,
    plain_attributes,
    profiling_error,
)
from .trial_copy import parts_of, trial_copy

LARGE = 1 << 14  # bytes of parameters: a step on real ones allocates several times as much
SCALARS = 256  # bytes of an update: more are no scalars
UNLIMITED = 1 << 62  # bytes of a window
PAIRS = 32  # are measured; for the others the sum of both is assumed

_update_times: dict[str, float] = {}  # microseconds; a cache, so that no kind is timed twice in a process
_measured: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[str, OptimizerBytes]] = weakref.WeakKeyDictionary()


def update_nbytes(optimizer: torch.optim.Optimizer, trained: Collection[Tensor] | None = None) -> tuple[int, int]:
    """Return the bytes of all states and of options that are tensors, and the most that one update allocates and frees.

    Raises:
        UpdateError: its step can't be called without a closure, or not with dense gradients.
    """
    states, workspaces = list[int](), [0]
    for part in parts_of(optimizer):
        profiler, rows = OptimizerProfiler(part), stepped_parameters(part)
        sure = frozenset(map(id, (p for row in rows for p in row) if trained is None else trained))
        states.append(profiler.states_nbytes(kinds_of(rows)))
        workspaces.append(profiler.workspace(rows, sure))
    return sum(states) + resident_bytes(option_tensors(optimizer)), max(workspaces)


def states_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all states, once they exist; errors as in `update_nbytes`."""
    parts = parts_of(optimizer)
    return sum(OptimizerProfiler(part).states_nbytes(kinds_of(stepped_parameters(part))) for part in parts)


def update_us(optimizer: torch.optim.Optimizer, trained: Collection[Tensor], window: int) -> float:
    """Return the microseconds of an update of what is trained, in windows of so many bytes."""
    sure = set(map(id, trained))
    rows = {
        part: [[p for p in group["params"] if id(p) in sure] for group in part.param_groups]
        for part in parts_of(optimizer)
    }
    us = (
        OptimizerProfiler(part).update_us(kind, window if is_elementwise(part) else UNLIMITED)
        for part in rows
        for kind in kinds_of(rows[part])
    )
    return round(sum(us), 1)


@dataclass(frozen=True)
class ParameterKind:
    """Parameters that are updated alike."""

    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, group: int, parameter: Tensor) -> ParameterKind:
        return cls(group, tuple(parameter.shape), parameter.dtype, parameter.device)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def within(self, elements: int) -> ParameterKind:
        """Return the kind with its largest sizes halved until so few elements are left."""
        shape = [*self.shape]
        while math.prod(shape) > elements:
            i = shape.index(max(shape))
            shape[i] = (shape[i] + 1) // 2
        return replace(self, shape=tuple(shape))

    def sample(self) -> Tensor:
        """Make up a parameter with a gradient."""
        parameter = torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=True)
        parameter.grad = torch.zeros_like(parameter)
        return parameter


class UpdateBytes(NamedTuple):
    """Bytes of the states after some steps, the most that one of these allocates and frees, and large leaves."""

    states: int
    workspace: int
    layouts: Layouts


KindPair = tuple[ParameterKind, ParameterKind]


@dataclass(frozen=True, eq=False)
class OptimizerBytes:
    """Bytes that were measured: the workspace of an update of some kinds, one after the other, and states of a kind.

    Attributes:
        extra: what real steps on these small kinds allocated more than steps on fakes; None if that is no constant.
    """

    workspaces: dict[tuple[ParameterKind, ...], int] = field(default_factory=dict)
    states: dict[ParameterKind, int] = field(default_factory=dict)
    layouts: dict[ParameterKind, Layouts] = field(default_factory=dict)
    extra: dict[tuple[ParameterKind, ...], int | None] = field(default_factory=dict)


class OptimizerProfiler:
    """Measurements of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        known = _measured_before(optimizer)
        self.workspaces, self.states, self.extra = known.workspaces, known.states, known.extra
        self.known_layouts = known.layouts
        self.steps = 0  # that real parameters take, as fakes have shown; 0 if they have not

    def states_nbytes(self, kinds: Collection[ParameterKind]) -> int:
        """Return the bytes of the states of parameters of these kinds."""
        for kind in kinds:
            self.update_workspace(kind)
        return sum(self.states[kind] for kind in kinds)

    def layouts(self, kind: ParameterKind) -> Layouts:
        """Return the leaves of the state of a parameter, as far as they are worth a place on the tier."""
        self.update_workspace(kind)
        return self.known_layouts[kind]

    def workspace(self, rows: Sequence[Sequence[Tensor]], sure: Container[int]) -> int:
        """Return the most that one update of these parameters of each group takes.

        Parameters whose ids are not in `sure` may have no gradient, and be left out.
        """
        kinds = [[(ParameterKind.of(i, p), id(p) in sure) for p in row] for i, row in enumerate(rows)]
        workspaces = [[self.update_workspace(kind) for kind, _ in row] for row in kinds]
        groups = self.optimizer.param_groups
        together = {i for i, row in enumerate(kinds) if row and _uses_foreach(groups[i], row[0][0].device)}
        pairs = [pair for pair in _consecutive(kinds) if not {pair[0].group, pair[1].group} & together]
        of_groups = [sum(row) if i in together else max(row, default=0) for i, row in enumerate(workspaces)]
        return max([*of_groups, self._pairs_workspace(pairs)], default=0)

    def update_workspace(self, *kinds: ParameterKind) -> int:
        """Return what an update of these takes, one after the other."""
        if kinds not in self.workspaces:
            self.workspaces[kinds] = self._measure_workspace(kinds)
        return self.workspaces[kinds]

    def update_us(self, kind: ParameterKind, window: int) -> float:
        """Return the microseconds of an update of one parameter whose states exist, of at most a window at a time."""
        self.update_workspace(kind)
        count = math.prod(kind.shape)
        nbytes = 2 * kind.dtype.itemsize + self.states[kind] / max(1, count)  # of an element
        if (fitting := int(window / nbytes)) >= count:
            return self._known_us(kind)
        return round(self._known_us(replace(kind, shape=(fitting,))) * count / fitting, 1)

    def _pairs_workspace(self, pairs: Collection[KindPair]) -> int:
        """The most that two consecutive updates take: the last temporaries of one overlap with the next one's."""
        most = 0
        runs = sorted((self._before(pair) + pair for pair in pairs), key=self._upper_bound, reverse=True)
        for i, kinds in enumerate(runs):
            if self._upper_bound(kinds) <= most:
                break
            most = max(most, self.update_workspace(*kinds) if i < PAIRS else self._upper_bound(kinds))
        return most

    def _upper_bound(self, kinds: Sequence[ParameterKind]) -> int:
        return sum(self.update_workspace(kind) for kind in kinds)

    def _before(self, pair: KindPair) -> tuple[ParameterKind, ...]:
        """Kinds to step on before a pair: the worst one of every other rank, each followed by a single element.

        Where vectors and matrices are updated by separate code, the last temporaries of one rank stay until the next
        parameter of that rank comes.
        """
        ranks = {len(kind.shape) for kind in pair}
        worst: dict[int, ParameterKind] = {}
        for kind in sorted(self.states, key=lambda kind: self.workspaces[kind,]):
            if kind.group == pair[0].group and len(kind.shape) not in ranks:
                worst[len(kind.shape)] = kind
        single = replace(pair[0], shape=(1,) * len(pair[0].shape))
        return tuple(each for kind in worst.values() for each in (kind, single))

    def _known_us(self, kind: ParameterKind) -> float:
        options = kernel_options(self.optimizer.param_groups[kind.group])
        where = f"{kernel_modes()} {environment_key(kind.device)}"
        key = f"update {type(self.optimizer)} {options} {kind.shape} {kind.dtype} {where}"
        return measure_once(_update_times, key, lambda: self._measure_us(kind), float, float)

    def _measure_us(self, kind: ParameterKind) -> float:
        clone = self._clone((kind,))
        step = partial(type(clone).step, clone)
        step()
        return shortest_us(step, kind.device, flush_caches(kind.device))

    def _measure_workspace(self, kinds: Sequence[ParameterKind]) -> int:
        measured = self._fake_nbytes(kinds) or self._real_nbytes(kinds)
        if len(kinds) == 1:
            self.states[kinds[0]], self.known_layouts[kinds[0]] = measured.states, measured.layouts
        return measured.workspace

    def _fake_nbytes(self, kinds: Sequence[ParameterKind]) -> UpdateBytes | None:
        """Return what steps on fakes of large parameters take, so that no budget is exceeded to measure them.

        None if they are small, if kernels take more than fakes show, or if fakes of small parameters with as many
        dimensions do not tell what real ones take.
        """
        if sum(kind.nbytes for kind in kinds) <= LARGE or any(kind.device != CPU for kind in kinds):
            return None
        small = tuple(kind.within(SAMPLE_ELEMENTS) for kind in kinds)
        try:
            if small not in self.extra:
                self.extra[small] = _extra(self._stepped_fakes(small), self._real_nbytes(small))
            extra = self.extra[small]
            if extra is None:
                return None
            found = self._stepped_fakes(kinds)
        except UpdateError:
            return None
        return found._replace(workspace=found.workspace + extra)

    def _stepped_fakes(self, kinds: Sequence[ParameterKind]) -> UpdateBytes:
        steps: list[FakeStep] = []

        def step_nbytes(clone: torch.optim.Optimizer, parameters: Collection[Tensor]) -> int:
            steps.append(fake_step(clone, parameters))
            return steps[-1].nbytes

        with ConstantFakeMode():
            found = self._stepped(kinds, step_nbytes)
        if not all(step.is_whole for step in steps):
            later = [step.nbytes for step in steps[1:]]
            self.steps = max(self.steps, 2 + later.index(max(later)))
            raise UpdateError("kernels of its ops take memory that no fake shows")
        return found

    def _real_nbytes(self, kinds: Sequence[ParameterKind]) -> UpdateBytes:
        def step_nbytes(clone: torch.optim.Optimizer, _: object) -> int:
            return run_unprofiled(partial(_step_nbytes, clone, kinds[0].device))

        return self._stepped(kinds, step_nbytes, self.steps)

    def _stepped(self, kinds: Sequence[ParameterKind], step_nbytes: Callable[..., int], count: int = 0) -> UpdateBytes:
        """Return the bytes of the first `count` steps on parameters of these kinds; of all that may differ with 0.

        Raises:
            UpdateError: a step fails.
        """
        clone = self._clone(kinds)
        parameters = [p for group in clone.param_groups for p in group["params"]]
        try:
            first, *later = [step_nbytes(clone, parameters) for _ in range(count or distinct_steps(clone))]
        except Exception as error:
            raise profiling_error(clone, error) from error
        kept = resident_bytes(state_tensors(clone))
        leaves = state_leaves(clone.state.get(parameters[0], {}))
        layouts = {leaf.name: tensor_spec_of(leaf.tensor) for leaf in leaves if is_movable(leaf)}
        # An update in backward takes the clone's own tensors as well.
        return UpdateBytes(kept, max(0, first - kept, *later) + clone_nbytes(clone), layouts)

    def _clone(self, kinds: Sequence[ParameterKind]) -> torch.optim.Optimizer:
        """The optimizer over made-up parameters that have a gradient and no steps yet."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        samples = [(kind.group, kind.sample()) for kind in kinds]
        initial = {p: initial_state(optimizer, groups[group], p) for group, p in samples}
        state = defaultdict(dict, {p: state for p, state in initial.items() if state})
        param_groups = [
            {**groups[i], "params": [p for group, p in samples if group == i]}
            for i in sorted({kind.group for kind in kinds})
        ]
        clone = trial_copy(optimizer)
        clone.state, clone.param_groups = state, param_groups
        return clone


def _measured_before(optimizer: torch.optim.Optimizer) -> OptimizerBytes:
    """Return what was measured of an optimizer with its present options and attributes."""
    text = kernel_text(optimizer)
    known, measured = _measured.get(optimizer, ("", OptimizerBytes()))
    if known != text:
        measured = OptimizerBytes()
        _measured[optimizer] = text, measured
    return measured


def kernel_text(optimizer: torch.optim.Optimizer) -> str:
    """Return what may decide which kernels a step runs, as far as it is plain: options, and attributes of a class."""
    options = [kernel_options(group) for group in optimizer.param_groups]
    return repr((options, {} if type(optimizer) in ELEMENTWISE else plain_attributes(optimizer)))


def _extra(fake: UpdateBytes, real: UpdateBytes) -> int | None:
    """Return what scalars take, which ops make of numbers and no fake shows."""
    more = real.workspace - fake.workspace
    return more if fake.states == real.states and 0 <= more <= SCALARS else None


def _step_nbytes(clone: torch.optim.Optimizer, device: torch.device) -> int:
    """The most that a step allocates; the states of the one before stay until it has ended."""
    before = list(state_tensors(clone))
    _, allocated = measure_peak(lambda: type(clone).step(clone), device)
    del before
    return allocated.peak if allocated else 0


def kernel_options(group: Mapping[str, object]) -> dict[str, object]:
    """Reduce a group's options to what may decide which kernels run."""
    return {key: _kernel_option(value) for key, value in group.items() if key != "params"}


def _kernel_option(option: object) -> object:
    if isinstance(option, tuple | list):
        return [_kernel_option(item) for item in option]
    if isinstance(option, bool | str) or option is None:
        return option
    return option != 0 if isinstance(option, int | float) else type(option).__name__


def _consecutive(rows: Sequence[Sequence[tuple[ParameterKind, bool]]]) -> set[KindPair]:
    """All pairs that may follow one another, if those that are not sure to be trained may be left out."""
    pairs, next_kinds = set[KindPair](), set[ParameterKind]()
    for kind, sure in reversed([item for row in rows for item in row]):
        pairs |= {(kind, other) for other in next_kinds}
        next_kinds = {kind} if sure else next_kinds | {kind}
    return pairs


def stepped_parameters(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Return the parameters of each group that are trained or have a state."""
    return [
        [p for p in group["params"] if may_be_stepped(p) or p in optimizer.state] for group in optimizer.param_groups
    ]


def may_be_stepped(parameter: Tensor) -> bool:
    """Return True if an update may find a gradient: a frozen parameter has none unless it exists already."""
    return parameter.requires_grad or parameter.grad is not None


def kinds_of(rows: Iterable[Iterable[Tensor]]) -> list[ParameterKind]:
    """Return the kind of each parameter of each group."""
    return [ParameterKind.of(i, parameter) for i, row in enumerate(rows) for parameter in row]


def _uses_foreach(group: dict[str, Any], device: torch.device) -> bool:
    """Return True if the update treats all parameters at once, as torch does on a GPU unless told otherwise."""
    foreach = group.get("foreach")
    return bool(foreach) if foreach is not None else device.type != "cpu" and not group.get("fused")
