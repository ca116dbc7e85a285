"""Step a copy of an optimizer on made-up parameters, to find what it keeps on the device and what its update takes.

    AdamW over 25.3M parameters  ->  states 202.4 MB, workspace of the update 8.4 MB
    f32[1024, 256] of them       ->  310 us for its update alone

It steps on one parameter of each distinct shape, and on each two that may follow one another where that may take more,
so that no rule about any optimizer is written here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..guards.signature import kernel_modes
from ..profile.memory_meter import measure_peak, resident_bytes
from ..system.device import keeping_freed_memory
from ..system.measurement_cache import measure_once
from ..system.profiler_thread import run_unprofiled
from ..system.setting import environment_key
from ..system.timer import flush_caches, shortest_us
from .optimizer_clone import STEPS, clone_nbytes, clone_optimizer, initial_state, profiling_error

PAIRS = 32  # are tried; beyond, both together are assumed to be there

KindPair = tuple["ParameterKind", "ParameterKind"]
_update_times: dict[str, float] = {}  # of updates, in microseconds


def update_nbytes(optimizer: torch.optim.Optimizer, trained: Collection[Tensor] | None = None) -> tuple[int, int]:
    """Bytes of all states, and at most what one update allocates and frees.

    Raises:
        UpdateError: its step can't be called without a closure, or not with dense gradients.
    """
    trial, rows = OptimizerProfiler(optimizer), stepped_parameters(optimizer)
    sure = frozenset(map(id, (p for row in rows for p in row) if trained is None else trained))
    return trial.states_nbytes(kinds_of(rows)), trial.workspace(rows, sure)


def states_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all states, once they are made; errors as in `update_nbytes`."""
    return OptimizerProfiler(optimizer).states_nbytes(kinds_of(stepped_parameters(optimizer)))


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """The tensors that the optimizer holds now."""
    return (leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class ParameterKind:
    """What parameters have in common whose update is alike."""

    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made_up(self) -> Tensor:
        parameter = torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=True)
        parameter.grad = torch.zeros_like(parameter)
        return parameter


class OptimizerProfiler:
    """A copy of an optimizer that steps on made-up parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.works: dict[tuple[ParameterKind, ...], int] = {}
        self.states: dict[ParameterKind, int] = {}

    def states_nbytes(self, kinds: Collection[ParameterKind]) -> int:
        """Bytes of the states of parameters of these kinds."""
        for kind in kinds:
            self.run(kind)
        return sum(self.states[kind] for kind in kinds)

    def workspace(self, rows: Sequence[Sequence[Tensor]], sure: Container[int]) -> int:
        """What one update of these parameters of each group takes at most, of which those that are not `sure` to have
        a gradient, by their ids, may be left out."""
        kinds = [[(_kind(i, p), id(p) in sure) for p in row] for i, row in enumerate(rows)]
        works = [[self.run(kind) for kind, _ in row] for row in kinds]
        groups = self.optimizer.param_groups
        together = {i for i, row in enumerate(kinds) if row and _foreach(groups[i], row[0][0].device)}
        apart = [pair for pair in _in_a_row(kinds) if not {pair[0].group, pair[1].group} & together]
        found = [sum(row) if i in together else max(row, default=0) for i, row in enumerate(works)]
        return max([*found, self.most(apart)], default=0)

    def most(self, pairs: Collection[KindPair]) -> int:
        """The most that two take of which one follows the other: its last temporaries are there while those of the
        other are made."""
        found = 0
        runs = sorted((self._before(pair) + pair for pair in pairs), key=self._bound, reverse=True)
        for tried, kinds in enumerate(runs):
            if self._bound(kinds) <= found:
                break
            found = max(found, self.run(*kinds) if tried < PAIRS else self._bound(kinds))
        return found

    def run(self, *kinds: ParameterKind) -> int:
        """What an update of these takes, one after the other."""
        if kinds not in self.works:
            self.works[kinds] = self._run(kinds)
        return self.works[kinds]

    def us(self, kind: ParameterKind, window: int) -> float:
        """The microseconds of an update of one parameter whose states are there; of a large one what fits a window is
        stepped on."""
        self.run(kind)
        count = math.prod(kind.shape)
        each = 2 * kind.dtype.itemsize + self.states[kind] / max(1, count)
        if (fits := int(window / each)) >= count:
            return self._priced(kind)
        return round(self._priced(replace(kind, shape=(fits,))) * count / fits, 1)

    def _priced(self, kind: ParameterKind) -> float:
        group = kernel_options(self.optimizer.param_groups[kind.group])
        where = f"{kernel_modes()} {environment_key(kind.device)}"
        key = f"update {type(self.optimizer)} {group} {kind.shape} {kind.dtype} {where}"
        return measure_once(_update_times, key, lambda: self._us(kind), float, float)

    def _us(self, kind: ParameterKind) -> float:
        alone = self._alone((kind,))
        step = partial(type(alone).step, alone)
        step()
        with keeping_freed_memory():
            return shortest_us(step, kind.device, flush_caches(kind.device))

    def _bound(self, kinds: Sequence[ParameterKind]) -> int:
        return sum(self.run(kind) for kind in kinds)

    def _before(self, pair: KindPair) -> tuple[ParameterKind, ...]:
        """Where vectors and matrices are updated each in a way of its own, the last temporaries of one stay until the
        next of its sort comes.  Between them stands a parameter of one element."""
        sorts = {len(kind.shape) for kind in pair}
        others: dict[int, ParameterKind] = {}
        for kind in sorted(self.states, key=lambda kind: self.works[kind,]):
            if kind.group == pair[0].group and len(kind.shape) not in sorts:
                others[len(kind.shape)] = kind
        between = replace(pair[0], shape=(1,) * len(pair[0].shape))
        return tuple(one for kind in others.values() for one in (kind, between))

    def _alone(self, kinds: Sequence[ParameterKind]) -> torch.optim.Optimizer:
        """The optimizer, as one of made-up parameters that have a gradient and have not been stepped on."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        made = [(kind.group, kind.made_up()) for kind in kinds]
        first = {p: initial_state(optimizer, groups[group], p) for group, p in made}
        state = defaultdict(dict, {p: state for p, state in first.items() if state})
        given = [
            {**groups[i], "params": [p for group, p in made if group == i]}
            for i in sorted({kind.group for kind in kinds})
        ]
        return clone_optimizer(optimizer, given, state)

    def _run(self, kinds: Sequence[ParameterKind]) -> int:
        alone = self._alone(kinds)
        try:
            first, *later = [run_unprofiled(partial(_stepped, alone, kinds[0].device)) for _ in range(STEPS)]
        except Exception as error:
            raise profiling_error(alone, error) from error
        kept = resident_bytes(state_tensors(alone))
        if len(kinds) == 1:
            self.states[kinds[0]] = kept
        return max(0, first - kept, *later) + clone_nbytes(alone)  # which an update in backward takes as well


def _stepped(alone: torch.optim.Optimizer, device: torch.device) -> int:
    """The most that a step allocates; the states of the one before stay until it has ended."""
    before = list(state_tensors(alone))
    _, allocated = measure_peak(lambda: type(alone).step(alone), device)
    del before
    return allocated.peak if allocated else 0


def kernel_options(group: Mapping[str, object]) -> dict[str, object]:
    """What of a group's options may decide which kernels run."""
    return {key: _sort(value) for key, value in group.items() if key != "params"}


def _sort(option: object) -> object:
    """What of an option may decide which kernels run."""
    if isinstance(option, tuple | list):
        return [_sort(part) for part in option]
    if isinstance(option, bool | str) or option is None:
        return option
    return option != 0 if isinstance(option, int | float) else type(option).__name__


def _in_a_row(rows: Sequence[Sequence[tuple[ParameterKind, bool]]]) -> set[KindPair]:
    """Each two that may follow one another, if those that are not sure to be trained may be left out."""
    pairs, after = set[KindPair](), set[ParameterKind]()
    for kind, sure in reversed([one for row in rows for one in row]):
        pairs |= {(kind, other) for other in after}
        after = {kind} if sure else after | {kind}
    return pairs


def stepped_parameters(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """The parameters of each group that are trained or were."""
    return [
        [p for p in group["params"] if may_be_stepped(p) or p in optimizer.state] for group in optimizer.param_groups
    ]


def may_be_stepped(parameter: Tensor) -> bool:
    """Whether an update may find a gradient: what is frozen has none but one that is there already."""
    return parameter.requires_grad or parameter.grad is not None


def kinds_of(rows: Iterable[Iterable[Tensor]]) -> list[ParameterKind]:
    """Of each of these parameters of each group."""
    return [_kind(i, parameter) for i, row in enumerate(rows) for parameter in row]


def _kind(group: int, parameter: Tensor) -> ParameterKind:
    return ParameterKind(group, tuple(parameter.shape), parameter.dtype, parameter.device)


def _foreach(group: dict[str, Any], device: torch.device) -> bool:
    """Whether the update treats all parameters at once, as torch does on a GPU unless told otherwise."""
    asked = group.get("foreach")
    return bool(asked) if asked is not None else device.type != "cpu" and not group.get("fused")
