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
from collections.abc import Callable, Collection, Container, Sequence
from contextlib import suppress
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
from ..system.fake_log import without_fake_errors
from ..system.measurement_cache import measure_once
from ..system.profiler_thread import run_unprofiled
from ..system.setting import environment_key
from ..system.timer import flush_caches, shortest_us
from ..tensors.layout import is_dense
from ..tensors.parameter_groups import option_tensors, state_tensors
from ..tensors.state_leaves import state_leaves
from .elementwise import has_torchs_step, is_elementwise, unhooked_step
from .fake_step import FakeStep, FakeSteps, fake_step, fake_steps
from .kernel_text import kernel_options, kernel_text
from .parameter_kind import ParameterKind, kinds_of, stepped_parameters
from .trial_copy import (
    SAMPLE_ELEMENTS,
    distinct_steps,
    forked_draws,
    initial_state,
    parts_of,
    trial_copy,
    trial_error,
)

LARGE = 1 << 14  # bytes of parameters: a step on real ones allocates several times as much
SCALARS = 256  # bytes of an update: more are no scalars
UNLIMITED = 1 << 62  # bytes of a window
TOGETHER = 2  # steps on all parameters at once: the first makes states, and the second finds them
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
        together = profiler.together(kinds_of(rows))
        states.append(max(together.states, profiler.states_nbytes(kinds_of(rows))))
        workspaces.append(max(together.workspace, profiler.workspace(rows, sure)))
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


class UpdateBytes(NamedTuple):
    """Bytes of the states after some steps, the most that one of these allocates and frees, and large leaves."""

    states: int
    workspace: int
    layouts: Layouts


KindPair = tuple[ParameterKind, ParameterKind]


@dataclass(eq=False)
class OptimizerBytes:
    """Bytes that were measured: the workspace of an update of some kinds, one after the other, and states of a kind.

    Attributes:
        extra: what real steps on these small kinds allocated more than steps on fakes; None if that is no constant.
        together: what a class of the user takes for all that it steps on.
        reads_all: its step reads every gradient without a look, so all parameters need one.
    """

    workspaces: dict[tuple[ParameterKind, ...], int] = field(default_factory=dict)
    states: dict[ParameterKind, int] = field(default_factory=dict)
    layouts: dict[ParameterKind, Layouts] = field(default_factory=dict)
    extra: dict[tuple[ParameterKind, ...], int | None] = field(default_factory=dict)
    together: dict[tuple[ParameterKind, ...], FakeSteps] = field(default_factory=dict)
    reads_all: bool = False


class OptimizerProfiler:
    """Measurements of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        known = _measured_before(optimizer)
        self.workspaces, self.states, self.extra = known.workspaces, known.states, known.extra
        self.known_layouts, self.known_together = known.layouts, known.together
        self.known = known
        self.steps = 0  # that real parameters take, as fakes have shown; 0 if they have not

    @property
    def has_places(self) -> bool:
        """True if a made-up parameter is tried in the place of one that the class has; elements have none."""
        kind = type(self.optimizer)
        return not (self.known.reads_all or has_torchs_step(kind) or is_elementwise(self.optimizer))

    def states_nbytes(self, kinds: Collection[ParameterKind]) -> int:
        """Return the bytes of the states of parameters of these kinds."""
        for kind in kinds:
            self.update_workspace(kind)
        return sum(self.states[kind] for kind in kinds)

    def layouts(self, kind: ParameterKind) -> Layouts:
        """Return the leaves of the state of a parameter, as far as they are dense."""
        self.update_workspace(kind)
        return self.known_layouts[kind]

    def element_nbytes(self, group: int, dtype: torch.dtype, device: torch.device = CPU) -> int:
        """Return the bytes of the states of an element."""
        layouts = self.layouts(ParameterKind(group, (SAMPLE_ELEMENTS,), dtype, device))
        return sum(spec.dtype.itemsize for spec in layouts.values())

    def scalar_devices(self, kind: ParameterKind) -> dict[str, torch.device]:
        """Return the devices of the numbers that a first step makes."""
        self.update_workspace(kind)
        clone, _ = self._clone((replace(kind, shape=(2,)),))
        with forked_draws(kind.device):
            unhooked_step(type(clone))(clone)
        (state,) = clone.state.values()
        return {key: value.device for key, value in state.items() if isinstance(value, Tensor) and not value.dim()}

    def scalars_nbytes(self, kind: ParameterKind) -> int:
        """Return the bytes of what a state has beside those."""
        return self.states_nbytes([kind]) - sum(spec.nbytes for spec in self.layouts(kind).values())

    def workspace(self, rows: Sequence[Sequence[Tensor]], sure: Container[int]) -> int:
        """Return the most that one update of these parameters of each group takes.

        Parameters whose ids are not in `sure` may have no gradient, and be left out.
        """
        kinds = [[(ParameterKind.of(i, p), id(p) in sure) for p in row] for i, row in enumerate(rows)]
        workspaces = [[self.update_workspace(kind) for kind, _ in row] for row in kinds]
        groups = self.optimizer.param_groups
        together = {i for i, row in enumerate(kinds) if row and uses_foreach(groups[i], row[0][0].device)}
        pairs = [pair for pair in _consecutive(kinds) if not {pair[0].group, pair[1].group} & together]
        of_groups = [sum(row) if i in together else max(row, default=0) for i, row in enumerate(workspaces)]
        return max([*of_groups, self._pairs_workspace(pairs)], default=0)

    def together(self, kinds: Sequence[ParameterKind]) -> FakeSteps:
        """Return what a step takes on all of these at once: a class may keep tensors from one to the next.

        Nothing if its step can't be made on fakes: then only one parameter after the other has been tried.
        """
        kind = type(self.optimizer)
        if not kinds or (has_torchs_step(kind) and is_elementwise(self.optimizer)):
            return FakeSteps(0, 0)
        if (key := tuple(kinds)) not in self.known_together:
            self.known_together[key] = self._stepped_together(kinds)
        return self.known_together[key]

    def _stepped_together(self, kinds: Sequence[ParameterKind]) -> FakeSteps:
        with forked_draws(kinds[0].device), suppress(Exception):  # whatever the class raises
            if sum(kind.nbytes for kind in kinds) <= LARGE:
                return FakeSteps(*self._real_nbytes(kinds)[:2])
            with ConstantFakeMode(), without_fake_errors():
                found = fake_steps(*self._clone(kinds), TOGETHER)
            return found._replace(workspace=found.workspace + self._most_scalars(set(kinds)))
        return FakeSteps(0, 0)

    def _most_scalars(self, kinds: Collection[ParameterKind]) -> int:
        try:
            found = [self._scalars_nbytes((kind.within(SAMPLE_ELEMENTS),)) for kind in kinds]
        except UpdateError:
            return SCALARS
        return max(SCALARS if nbytes is None else nbytes for nbytes in found)

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
        runs = sorted(pairs, key=self._upper_bound, reverse=True)
        for i, kinds in enumerate(runs):
            if self._upper_bound(kinds) <= most:
                break
            most = max(most, self.update_workspace(*kinds) if i < PAIRS else self._upper_bound(kinds))
        return most

    def _upper_bound(self, kinds: Sequence[ParameterKind]) -> int:
        return sum(self.update_workspace(kind) for kind in kinds)

    def _known_us(self, kind: ParameterKind) -> float:
        options = kernel_options(self.optimizer.param_groups[kind.group])
        where = f"{kernel_modes()} {environment_key(kind.device)}"
        key = f"update {type(self.optimizer)} {options} {kind.shape} {kind.dtype} {where}"
        return measure_once(_update_times, key, lambda: self._measure_us(kind), float, float)

    def _measure_us(self, kind: ParameterKind) -> float:
        clone, _ = self._clone((kind,))
        step = partial(unhooked_step(type(clone)), clone)
        with forked_draws(kind.device):
            step()
            return shortest_us(step, kind.device, flush_caches(kind.device))

    def _measure_workspace(self, kinds: Sequence[ParameterKind]) -> int:
        with forked_draws(kinds[0].device):
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
            extra = self._scalars_nbytes(small)
            if extra is None:
                return None
            found = self._stepped_fakes(kinds)
        except UpdateError:
            return None
        return found._replace(workspace=found.workspace + extra)

    def _scalars_nbytes(self, small: tuple[ParameterKind, ...]) -> int | None:
        """Return what real steps allocate more than steps on fakes: scalars, which ops make of numbers, or None."""
        if small not in self.extra:
            fake, real = self._stepped_fakes(small), self._real_nbytes(small)
            more = real.workspace - fake.workspace
            self.extra[small] = more if fake.states == real.states and 0 <= more <= SCALARS else None
        return self.extra[small]

    def _stepped_fakes(self, kinds: Sequence[ParameterKind]) -> UpdateBytes:
        steps: list[FakeStep] = []

        def step_nbytes(clone: torch.optim.Optimizer, parameters: Collection[Tensor]) -> int:
            steps.append(fake_step(clone, parameters))
            return steps[-1].nbytes

        with ConstantFakeMode(), without_fake_errors():
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
        clone, parameters = self._clone(kinds)
        try:
            first, *later = [step_nbytes(clone, parameters) for _ in range(count or distinct_steps(clone))]
        except Exception as error:
            if self.has_places:
                self.known.reads_all = True
                return self._stepped(kinds, step_nbytes, count)
            raise trial_error(clone, error) from error
        kept = resident_bytes(state_tensors(clone))
        leaves = state_leaves(clone.state.get(parameters[0], {}))
        layouts = {leaf.name: tensor_spec_of(leaf.tensor) for leaf in leaves if is_dense(leaf.tensor)}
        return UpdateBytes(kept, max(0, first - kept, *later), layouts)

    def _clone(self, kinds: Sequence[ParameterKind]) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        """Return the optimizer over made-up parameters that have a gradient and no steps yet, and these.

        In a class of the user each has a place that one of its kind has, for rules by places; no other has a gradient.
        """
        optimizer = self.optimizer
        rows = [[*group["params"]] if self.has_places else [] for group in optimizer.param_groups]
        others = {parameter: torch.zeros(1) for row in rows for parameter in row}
        clone = trial_copy(optimizer, others)
        free = [dict(enumerate(row)) for row in rows]
        samples, initial = list[Tensor](), dict[Tensor, dict[str, Any]]()
        for kind in kinds:
            samples.append(sample := kind.sample())
            group = clone.param_groups[kind.group]
            if (place := kind.place(free[kind.group])) is None:
                group["params"].append(sample)
            else:
                group["params"][place] = sample
                del free[kind.group][place]
            if state := initial_state(optimizer, group, sample):
                initial[sample] = state
        clone.state = defaultdict(dict, initial)
        clone.param_groups = [group for group in clone.param_groups if group["params"]]
        return clone, samples


def _measured_before(optimizer: torch.optim.Optimizer) -> OptimizerBytes:
    """Return what was measured of an optimizer with its present options and attributes."""
    text = kernel_text(optimizer)
    known, measured = _measured.get(optimizer, ("", OptimizerBytes()))
    if known != text:
        measured = OptimizerBytes()
        _measured[optimizer] = text, measured
    return measured


def _step_nbytes(clone: torch.optim.Optimizer, device: torch.device) -> int:
    """The most that a step allocates; the states of the one before stay until it has ended."""
    before = list(state_tensors(clone))
    _, allocated = measure_peak(lambda: unhooked_step(type(clone))(clone), device)
    del before
    return allocated.peak if allocated else 0


def _consecutive(rows: Sequence[Sequence[tuple[ParameterKind, bool]]]) -> set[KindPair]:
    """All pairs that may follow one another, if those that are not sure to be trained may be left out."""
    pairs, next_kinds = set[KindPair](), set[ParameterKind]()
    for kind, sure in reversed([item for row in rows for item in row]):
        pairs |= {(kind, other) for other in next_kinds}
        next_kinds = {kind} if sure else next_kinds | {kind}
    return pairs


def uses_foreach(group: dict[str, Any], device: torch.device) -> bool:
    """Return True if the update treats all parameters at once, as torch does on a GPU unless told otherwise."""
    foreach = group.get("foreach")
    return bool(foreach) if foreach is not None else device.type != "cpu" and not group.get("fused")
