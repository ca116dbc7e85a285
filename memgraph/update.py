"""What an optimizer keeps on the device, and what its update allocates: found by stepping it on made-up parameters.

    AdamW over 25.3M parameters  ->  states 202.4 MB, workspace of the update 8.4 MB
    AdamW in backward            ->  and what each update takes there: 310 us for f32[1024, 256]

A copy of the optimizer steps on one parameter of each distinct shape, and on each two that may follow one another where
that may take more, so that no rule about any optimizer is written here.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from passes import Op, Storage, Trace
from passes.updates import early

from .costs import once
from .device import keeping_freed_memory
from .peak import measured, resident_bytes
from .setting import setting
from .signature import kernel_modes
from .state_parts import StatePart
from .stepper import STEPS, untried
from .stopwatch import cool, shortest

STATE = "optimizer_state"  # what is of one part of the states has the part's number behind it
PAIRS = 32  # are tried; beyond, both together are assumed to be there

Pair = tuple["Kind", "Kind"]
_times: dict[str, float] = {}  # of updates, in microseconds


@dataclass(frozen=True)
class Kind:
    """What parameters have in common whose update is alike."""

    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made_up(self) -> Tensor:
        parameter = torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=True)
        parameter.grad = torch.zeros_like(parameter)
        return parameter


def with_update(
    trace: Trace, optimizer: torch.optim.Optimizer, trained: Collection[Tensor], parts: Sequence[StatePart],
    inside: Mapping[str, Tensor] | None = None, owned: Mapping[Tensor, Sequence[str]] | None = None,
    window: int = 1 << 62,
) -> Trace:  # fmt: skip
    """The trace with the optimizer's states among its inputs and its update as its last op.

    All of `trained` have a gradient then.  Each of `parts`, which may live in the far tier, is a value of its own.
    `inside` are the parameters that ops in backward update, by the ops' names; then a part is of one parameter, and no
    more than a window of one is stepped on to find the time of its update.
    `owned` are the values of each parameter: its bytes, and its gradient.
    """
    if inside:
        return _with_updates(trace, optimizer, parts, inside, window)
    nbytes, workspace = update_nbytes(optimizer, trained)
    whose = [[value for p in part.parameters for value in (owned or {}).get(p, ())] for part in parts]
    return with_step(trace, type(optimizer).__name__, nbytes, workspace, [part.nbytes for part in parts], whose)


def with_step(
    trace: Trace, name: str, nbytes: int, workspace: int, sizes: Sequence[int] = (), whose: Sequence[Sequence[str]] = ()
) -> Trace:
    """The trace with states of so many bytes in all, `sizes` of them in parts of their own, and with an update that
    takes so much workspace.  It reads behind each part the values `whose` the states are."""
    states = [_state(f"{STATE}_{i}", size, name, f"u8[{size}]") for i, size in enumerate(sizes)]
    states.append(_state(STATE, nbytes - sum(sizes), name))  # without a type it can't be streamed
    gradients = dict.fromkeys(value for kind, value in trace.outputs if kind != "output")
    parameters = (op.name for op in trace.ops if op.fn == "parameter")
    owned = [*whose, *([()] * (len(states) - len(whose)))]
    reads = dict.fromkeys(read for state, values in zip(states, owned, strict=True) for read in (state.name, *values))
    reads |= dict.fromkeys((*gradients, *parameters))
    update = Op("optimizer_step", f"{name}.step", tuple(reads), phase="update", workspace=workspace)
    return replace(trace, ops=(*states, *trace.ops, update))


def with_price(trace: Trace, optimizer: torch.optim.Optimizer, trained: Collection[Tensor], window: int) -> Trace:
    """The trace with the time of the update that is its last op, as it is in windows of so many bytes."""
    trial, sure = _Trial(optimizer), set(map(id, trained))
    kinds = [_kind(i, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"] if id(p) in sure]
    us = round(sum(trial.us(kind, window) for kind in kinds), 1)
    return replace(trace, ops=(*trace.ops[:-1], replace(trace.ops[-1], us=us)))


def _with_updates(
    trace: Trace, optimizer: torch.optim.Optimizer, parts: Sequence[StatePart], inside: Mapping[str, Tensor],
    window: int,
) -> Trace:  # fmt: skip
    """The trace in which each update in backward reads the states of its own parameter, and only those that are not
    `inside`, and may have a gradient from elsewhere, wait for the end."""
    trial, name = _Trial(optimizer), type(optimizer).__name__
    rows = _rows(optimizer)
    kinds = {p: _kind(i, p) for i, row in enumerate(rows) for p in row}
    works = {p: trial.run(kind) for p, kind in kinds.items()}
    sizes = {p: part.nbytes for part in parts for p in part.parameters}
    states = {p: _state(f"{STATE}_{i}", size, name, f"u8[{size}]") for i, (p, size) in enumerate(sizes.items())}
    rest = _state(STATE, sum(trial.states[kind] for kind in kinds.values()) - sum(sizes.values()), name)

    def stepping(op: Op) -> Op:
        if op.name not in inside:
            return op
        p = inside[op.name]
        reads, us = (states.get(p, rest).name, *op.reads), trial.us(kinds[p], window)
        return replace(op, fn=f"{name}.step", reads=reads, workspace=works[p], us=us)

    ops = (*states.values(), rest, *map(stepping, trace.ops))
    done = set(inside.values())
    late = [[p for p in row if p not in done and _may_be_stepped(p)] for row in rows]
    if any(late):
        reads = (rest.name, *(value for kind, value in trace.outputs if kind != "output"))
        workspace = trial.workspace(late, frozenset())
        ops = (*ops, Op("optimizer_step", f"{name}.step", reads, phase="update", workspace=workspace))
    return early(replace(trace, ops=ops))


def _state(name: str, nbytes: int, where: str, type: str = "") -> Op:
    return Op(name, "state", makes=(Storage(name, nbytes),), holds=(name,), type=type, where=where)


def update_nbytes(optimizer: torch.optim.Optimizer, trained: Collection[Tensor] | None = None) -> tuple[int, int]:
    """Bytes of all states, and at most what one update allocates and frees.

    Raises:
        UpdateError: its step can't be called without a closure, or not with dense gradients.
    """
    trial, rows = _Trial(optimizer), _rows(optimizer)
    sure = frozenset(map(id, (p for row in rows for p in row) if trained is None else trained))
    return trial.all_states([_kind(i, p) for i, row in enumerate(rows) for p in row]), trial.workspace(rows, sure)


def states_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all states, once they are made; errors as in `update_nbytes`."""
    return _Trial(optimizer).all_states([_kind(i, p) for i, row in enumerate(_rows(optimizer)) for p in row])


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """The tensors that the optimizer holds now."""
    return (leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor))


class _Trial:
    """A copy of an optimizer that steps on made-up parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.works: dict[tuple[Kind, ...], int] = {}
        self.states: dict[Kind, int] = {}

    def all_states(self, kinds: Collection[Kind]) -> int:
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

    def most(self, pairs: Collection[Pair]) -> int:
        """The most that two take of which one follows the other: its last temporaries are there while those of the
        other are made."""
        found = 0
        runs = sorted((self._before(pair) + pair for pair in pairs), key=self._bound, reverse=True)
        for tried, kinds in enumerate(runs):
            if self._bound(kinds) <= found:
                break
            found = max(found, self.run(*kinds) if tried < PAIRS else self._bound(kinds))
        return found

    def run(self, *kinds: Kind) -> int:
        """What an update of these takes, one after the other."""
        if kinds not in self.works:
            self.works[kinds] = self._run(kinds)
        return self.works[kinds]

    def us(self, kind: Kind, window: int) -> float:
        """The microseconds of an update of one parameter whose states are there; of a large one what fits a window is
        stepped on."""
        self.run(kind)
        count = math.prod(kind.shape)
        each = 2 * kind.dtype.itemsize + self.states[kind] / max(1, count)
        if (fits := int(window / each)) >= count:
            return self._priced(kind)
        return round(self._priced(replace(kind, shape=(fits,))) * count / fits, 1)

    def _priced(self, kind: Kind) -> float:
        group = sorted_options(self.optimizer.param_groups[kind.group])
        key = f"update {type(self.optimizer)} {group} {kind.shape} {kind.dtype} {kernel_modes()} {setting(kind.device)}"
        return once(_times, key, lambda: self._us(kind), float, float)

    def _us(self, kind: Kind) -> float:
        alone = self._alone((kind,))
        step = partial(type(alone).step, alone)
        step()
        with keeping_freed_memory():
            return shortest(step, kind.device, cool(kind.device))

    def _bound(self, kinds: Sequence[Kind]) -> int:
        return sum(self.run(kind) for kind in kinds)

    def _before(self, pair: Pair) -> tuple[Kind, ...]:
        """Where vectors and matrices are updated each in a way of its own, the last temporaries of one stay until the
        next of its sort comes.  Between them stands a parameter of one element."""
        sorts = {len(kind.shape) for kind in pair}
        others: dict[int, Kind] = {}
        for kind in sorted(self.states, key=lambda kind: self.works[kind,]):
            if kind.group == pair[0].group and len(kind.shape) not in sorts:
                others[len(kind.shape)] = kind
        between = replace(pair[0], shape=(1,) * len(pair[0].shape))
        return tuple(one for kind in others.values() for one in (kind, between))

    def _alone(self, kinds: Sequence[Kind]) -> torch.optim.Optimizer:
        """The optimizer, as one of made-up parameters that have a gradient and no states yet."""
        alone = copy.copy(self.optimizer)
        alone.state = defaultdict(dict)
        made = [(kind.group, kind.made_up()) for kind in kinds]
        alone.param_groups = [
            {**self.optimizer.param_groups[i], "params": [p for group, p in made if group == i]}
            for i in sorted({kind.group for kind in kinds})
        ]
        return alone

    def _run(self, kinds: Sequence[Kind]) -> int:
        alone = self._alone(kinds)
        try:
            allocated = [measured(lambda: type(alone).step(alone), kinds[0].device)[1] for _ in range(STEPS)]
        except Exception as error:
            raise untried(alone, error) from error
        kept = resident_bytes(state_tensors(alone))
        if len(kinds) == 1:
            self.states[kinds[0]] = kept
        first, *later = [seen.peak if seen else 0 for seen in allocated]
        return max(0, first - kept, *later)


def sorted_options(group: Mapping[str, object]) -> dict[str, object]:
    """What of a group's options may decide which kernels run."""
    return {key: _sort(value) for key, value in group.items() if key != "params"}


def _sort(option: object) -> object:
    """What of an option may decide which kernels run."""
    if isinstance(option, tuple | list):
        return [_sort(part) for part in option]
    if isinstance(option, bool | str) or option is None:
        return option
    return option != 0 if isinstance(option, int | float) else type(option).__name__


def _in_a_row(rows: Sequence[Sequence[tuple[Kind, bool]]]) -> set[Pair]:
    """Each two that may follow one another, if those that are not sure to be trained may be left out."""
    pairs, after = set[Pair](), set[Kind]()
    for kind, sure in reversed([one for row in rows for one in row]):
        pairs |= {(kind, other) for other in after}
        after = {kind} if sure else after | {kind}
    return pairs


def _rows(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """The parameters of each group that are trained or were."""
    return [
        [p for p in group["params"] if _may_be_stepped(p) or p in optimizer.state] for group in optimizer.param_groups
    ]


def _may_be_stepped(parameter: Tensor) -> bool:
    """Whether an update may find a gradient: what is frozen has none but one that is there already."""
    return parameter.requires_grad or parameter.grad is not None


def _kind(group: int, parameter: Tensor) -> Kind:
    return Kind(group, tuple(parameter.shape), parameter.dtype, parameter.device)


def _foreach(group: dict[str, Any], device: torch.device) -> bool:
    """Whether the update treats all parameters at once, as torch does on a GPU unless told otherwise."""
    asked = group.get("foreach")
    return bool(asked) if asked is not None else device.type != "cpu" and not group.get("fused")
