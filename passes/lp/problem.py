"""What can be decided about a step, as numbers: the columns of a linear program are made of it.

    a = relu(x)  # makes a:32768 | 10 us       Maker("a", us=10.0, items=(0,))
    b = mm(a, w)                          ->   Item("a", nbytes=32768, maker=0, left=1, use=5, readers=(1,))
    ...
    g = relu_backward(d, a)

Positions are indices of the trace's ops; makers and items have indices of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.arrays import Floats
from ..ir.machine import Machine
from ..simulate.forecast import Forecast, predict
from .state_vars import StateVar, find_state_vars

SMALLEST_OFFLOAD = 1 << 16  # bytes: what is smaller is not worth a trip to the far tier

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StorageVar:
    """A movable storage.

    `left` is the last forward position that uses it, `use` the first backward position that reads it, or the number of
    ops if none does.  `readers` are the makers that read it and may run again.  `wire` are its bytes once it is cast
    for its way, 0 if it may not leave so.
    """

    storage: str
    nbytes: int
    producer: int
    last_forward: int
    first_backward: int
    readers: tuple[int, ...]
    can_offload: bool
    wire_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ProducerOp:
    """A forward op that makes items; `once` if it may not run again."""

    value: str
    us: float
    runs_once: bool
    storages: tuple[int, ...]

    @property
    def makes_one(self) -> bool:
        """Whether it makes one item, which then is either saved or made again."""
        return len(self.storages) == 1


@dataclass(frozen=True, eq=False)
class PlanProblem:
    """A trace as makers and items.  It does not depend on the budget.

    Without `trips` no item leaves: of what lives far there is the state alone.
    """

    gaps: ReuseGaps
    machine: Machine
    offloads_activations: bool = field(default=True, kw_only=True)

    @cached_property
    def producers(self) -> tuple[ProducerOp, ...]:
        items: dict[str, list[int]] = {}
        for i, value in enumerate(self.gaps.producer.values()):
            items.setdefault(value, []).append(i)
        ops = self.gaps.trace.op
        return tuple(ProducerOp(value, ops[value].us, ops[value].once, tuple(made)) for value, made in items.items())

    @cached_property
    def storages(self) -> tuple[StorageVar, ...]:
        place = {maker.value: i for i, maker in enumerate(self.producers)}
        readers = self._readers()
        leaves = {storage: self._leaves(storage, readers[storage]) for storage in self.gaps.producer}
        return tuple(
            StorageVar(
                storage=storage,
                nbytes=self.gaps.trace.nbytes[storage],
                producer=place[value],
                last_forward=self.gaps.last_forward_use[storage],
                first_backward=self.gaps.uses.get(storage, (self.size,))[0],
                readers=tuple(readers[storage]),
                can_offload=leaves[storage],
                wire_nbytes=self.gaps.wire_nbytes(storage, self.machine.cast.dtype) if leaves[storage] else 0,
            )
            for storage, value in self.gaps.producer.items()
        )

    @cached_property
    def rng_draws(self) -> tuple[tuple[int, int, int], ...]:
        """The makers that draw and may run again, the bytes of the generator's state, and their positions."""
        found = ((o, self.gaps.trace.op[maker.value]) for o, maker in enumerate(self.producers) if not maker.runs_once)
        return tuple((o, op.draws, self.gaps.index[op.name]) for o, op in found if op.draws)

    @cached_property
    def states(self) -> tuple[StateVar, ...]:
        """What of the state may live far."""
        return find_state_vars(self.gaps, self.machine)

    @cached_property
    def storage_index(self) -> dict[str, int]:
        """The index of each item, by its storage."""
        return {item.storage: i for i, item in enumerate(self.storages)}

    @property
    def size(self) -> int:
        return len(self.gaps.trace.ops)

    @property
    def boundary(self) -> int:
        return self.gaps.trace.boundary

    @cached_property
    def update_positions(self) -> tuple[int, ...]:
        """The positions of updates."""
        return tuple(i for i, op in enumerate(self.gaps.trace.ops) if op.phase == "update")

    @property
    def copies_end(self) -> int:
        """Before which position copies have ended: that of the last update, or the number of ops."""
        return self.size - (self.size > self.boundary and self.size - 1 in self.update_positions)

    @cached_property
    def captured(self) -> Forecast:
        return predict(self.gaps.trace, self.machine)

    @cached_property
    def fixed(self) -> Floats:
        """The bytes at every position if every item were away in its gap: what no plan of the class can lower."""
        away = np.zeros(self.size + 1)
        for item in self.storages:
            if item.last_forward + 1 < item.first_backward < self.size:
                away[item.last_forward + 1] += item.nbytes
                away[item.first_backward] -= item.nbytes
        base: Floats = self.captured.total - np.cumsum(away)[:-1]
        return base

    @cached_property
    def in_use(self) -> Floats:
        """The bytes at every position that no plan without far homes lowers, whatever it runs again and how often: in
        backward, of the items only those that the op reads."""
        waiting = np.zeros(self.size + 1)
        for life in self.captured.lifetimes:
            if life.storage in self.storage_index and life.last >= self.boundary:
                waiting[self.storages[self.storage_index[life.storage]].first_backward] += life.nbytes
                waiting[life.last + 1] -= life.nbytes
        read = np.zeros(self.size)
        for position in range(self.boundary, self.size):
            read[position] = sum(self.storages[i].nbytes for i in self.read_at(position))
        used: Floats = self.fixed - np.cumsum(waiting)[:-1] + read
        return used

    def read_at(self, position: int) -> frozenset[int]:
        """The items that the op at a position reads, through views that backward makes as well."""
        trace = self.gaps.trace
        held = {s for value in trace.ops[position].reads for s in trace.op[value].holds}
        return frozenset(self.storage_index[s] for s in held if s in self.storage_index)

    @cached_property
    def floor(self) -> Floats:
        """The bytes at every position that no plan lowers: of what may live far only what the op reads."""
        change = np.zeros(self.size + 1)
        for resident in self.states:
            for rest in resident.gaps(self.size):
                change[rest.first] += resident.nbytes
                change[rest.last] -= resident.nbytes
        floor: Floats = self.in_use - np.cumsum(change)[:-1]
        for position in self.update_positions:
            floor[position] -= self.gaps.trace.ops[position].workspace - self.least_workspace(position)
        return floor

    def least_workspace(self, position: int) -> int:
        """The least that the op at a position takes while it runs: an update may run in windows."""
        nbytes = self.gaps.trace.ops[position].workspace
        return (
            min(nbytes, self.machine.streaming.window) if self.states and position in self.update_positions else nbytes
        )

    @cached_property
    def wanted(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Before which backward position each item is wanted at the earliest, to be read or to make another again; and
        before which each maker may run again.  The number of ops if there is none."""
        items, makers = [item.first_backward for item in self.storages], [self.size] * len(self.producers)
        for o in reversed(range(len(makers))):
            for i in self.producers[o].storages:
                items[i] = min([items[i], *(makers[w] for w in self.storages[i].readers)])
            makers[o] = min(items[i] for i in self.producers[o].storages)
        return tuple(items), tuple(makers)

    @cached_property
    def last_needs(self) -> tuple[int, ...]:
        """The backward position before which each item is wanted at the latest, if it is wanted at all."""
        items, makers = [item.first_backward for item in self.storages], [0] * len(self.producers)
        for o in reversed(range(len(makers))):
            for i in self.producers[o].storages:
                if items[i] == self.size:
                    items[i] = max((makers[w] for w in self.storages[i].readers), default=self.size)
            makers[o] = max(items[i] for i in self.producers[o].storages)
        return tuple(items)

    @cached_property
    def last_reruns(self) -> tuple[int, ...]:
        """From which backward position on each maker has run again, if it does: that before which what it makes is read
        or wanted for a re-run at the latest.  The number of ops if nobody wants it."""
        makers = [self.size] * len(self.producers)
        for o in reversed(range(len(makers))):
            items = (self.storages[i] for i in self.producers[o].storages)
            wants = (want for item in items for want in (item.first_backward, *(makers[w] for w in item.readers)))
            makers[o] = max((want for want in wants if want < self.size), default=self.size)
        return tuple(makers)

    @cached_property
    def nbytes(self) -> Floats:
        return np.array([item.nbytes for item in self.storages], dtype=np.float64)

    @cached_property
    def last_forward(self) -> Ints:
        return np.array([item.last_forward for item in self.storages], dtype=np.int64)

    @cached_property
    def first_backward(self) -> Ints:
        return np.array([item.first_backward for item in self.storages], dtype=np.int64)

    def _readers(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {storage: [] for storage in self.gaps.producer}
        for i, maker in enumerate(self.producers):
            if not maker.runs_once:
                reads = self.gaps.trace.op[maker.value].reads
                for storage in dict.fromkeys(held for read in reads for held in self.gaps.holds.get(read, ())):
                    found[storage].append(i)
        return found

    def _leaves(self, storage: str, readers: list[int]) -> bool:
        wanted = storage in self.gaps.whole_value and (storage in self.gaps.uses or bool(readers))
        there = self.offloads_activations and self.machine.link.works
        return wanted and there and self.gaps.trace.nbytes[storage] >= SMALLEST_OFFLOAD
