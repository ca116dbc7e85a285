"""A trace as numbers: what a plan can decide, and what the linear program has to know about it.

    a = relu(x)  # makes a:32768 | 10 us       ProducerOp("a", us=10.0, storages=(0,))
    b = mm(a, w)                          ->   StorageVar("a", nbytes=32768, producer=0, last_forward=1,
    ...                                                   first_backward=5, readers=(1,))
    g = relu_backward(d, a)

Positions are indices of the trace's ops.  Producers and storages have indices of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.arrays import Floats
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..simulate.forecast import Forecast, predict
from .state_vars import StateVar, find_state_vars

SMALLEST_OFFLOAD = 1 << 16  # bytes of an activation: for smaller ones a copy does not pay

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StorageVar:
    """A storage that forward makes, and that need not stay on the device until backward.

    Attributes:
        last_forward: the last forward position that uses it.
        first_backward: the first backward position that reads it; the number of ops if there is none.
        readers: the producers that read it and may be recomputed.
        wire_nbytes: its bytes once it is cast for its copy; 0 if it may not be cast.
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
    """A forward op that makes storages; `runs_once` if it may not be recomputed."""

    value: str
    us: float
    runs_once: bool
    storages: tuple[int, ...]

    @property
    def makes_one(self) -> bool:
        """Return True if it makes one storage, which is then either saved or recomputed."""
        return len(self.storages) == 1


@dataclass(frozen=True, eq=False)
class PlanProblem:
    """The producers, storages and states of a trace.  It does not depend on the budget.

    Without `offloads_activations` only state may be offloaded.
    """

    gaps: ReuseGaps
    machine: Machine
    offloads_activations: bool = field(default=True, kw_only=True)

    @cached_property
    def producers(self) -> tuple[ProducerOp, ...]:
        produced: dict[str, list[int]] = {}
        for i, value in enumerate(self.gaps.producer.values()):
            produced.setdefault(value, []).append(i)
        ops = self.gaps.trace.op
        return tuple(ProducerOp(value, ops[value].us, ops[value].once, tuple(each)) for value, each in produced.items())

    @cached_property
    def storages(self) -> tuple[StorageVar, ...]:
        index = {each.value: o for o, each in enumerate(self.producers)}
        readers = self._readers()
        can_offload = {storage: self._can_offload(storage, readers[storage]) for storage in self.gaps.producer}
        return tuple(
            StorageVar(
                storage=storage,
                nbytes=self.gaps.trace.nbytes[storage],
                producer=index[value],
                last_forward=self.gaps.last_forward_use[storage],
                first_backward=self.gaps.uses.get(storage, (self.size,))[0],
                readers=tuple(readers[storage]),
                can_offload=can_offload[storage],
                wire_nbytes=self.gaps.wire_nbytes(storage, self.machine.cast.dtype) if can_offload[storage] else 0,
            )
            for storage, value in self.gaps.producer.items()
        )

    @cached_property
    def rng_draws(self) -> tuple[tuple[int, int, int], ...]:
        """The recomputable producers that draw random numbers: index, bytes of the generator's state, position."""
        ops = ((o, self.gaps.trace.op[each.value]) for o, each in enumerate(self.producers) if not each.runs_once)
        return tuple((o, op.draws, self.gaps.trace.index[op.name]) for o, op in ops if op.draws)

    @cached_property
    def states(self) -> tuple[StateVar, ...]:
        """The parameters, gradients and optimizer states that may be offloaded."""
        return find_state_vars(self.gaps, self.machine)

    @cached_property
    def storage_index(self) -> dict[str, int]:
        return {each.storage: i for i, each in enumerate(self.storages)}

    @property
    def size(self) -> int:
        return len(self.gaps.trace.ops)

    @property
    def boundary(self) -> int:
        return self.gaps.trace.boundary

    @cached_property
    def update_positions(self) -> tuple[int, ...]:
        return tuple(i for i, op in enumerate(self.gaps.trace.ops) if op.phase == "update")

    @property
    def copies_end(self) -> int:
        """The position before which copies have ended: that of the last update, or the number of ops."""
        return self.size - (self.size > self.boundary and self.size - 1 in self.update_positions)

    @cached_property
    def captured(self) -> Forecast:
        return predict(self.gaps.trace, self.machine)

    @cached_property
    def fixed(self) -> Floats:
        """The bytes at every position without the storages between forward and backward, with all state.

        A plan that recomputes and reloads each value at most once has no less.
        """
        change = np.zeros(self.size + 1)
        for each in self.storages:
            if each.last_forward + 1 < each.first_backward < self.size:
                change[each.last_forward + 1] += each.nbytes
                change[each.first_backward] -= each.nbytes
        fixed: Floats = self.captured.total - np.cumsum(change)[:-1]
        return fixed

    @cached_property
    def in_use(self) -> Floats:
        """The bytes at every position that no plan without offloaded state has less of, however often it recomputes.

        In backward these include a storage only where the op reads it.
        """
        waiting = np.zeros(self.size + 1)
        for life in self.captured.lifetimes:
            if life.storage in self.storage_index and life.last >= self.boundary:
                waiting[self.storages[self.storage_index[life.storage]].first_backward] += life.nbytes
                waiting[life.last + 1] -= life.nbytes
        read = np.zeros(self.size)
        for position in range(self.boundary, self.size):
            read[position] = sum(self.storages[i].nbytes for i in self.read_at(position))
        in_use: Floats = self.fixed - np.cumsum(waiting)[:-1] + read
        return in_use

    def read_at(self, position: int) -> frozenset[int]:
        """Return the storages that the op at a position reads, through views of backward as well."""
        trace = self.gaps.trace
        read = trace.held_by(trace.ops[position].reads)
        return frozenset(self.storage_index[storage] for storage in read if storage in self.storage_index)

    @cached_property
    def floor(self) -> Floats:
        """The bytes at every position that no plan has less of; these include a state only where the op reads it."""
        change = np.zeros(self.size + 1)
        for state in self.states:
            for gap in state.gaps(self.size):
                change[gap.first] += state.nbytes
                change[gap.last] -= state.nbytes
        floor: Floats = self.in_use - np.cumsum(change)[:-1]
        for position in self.update_positions:
            floor[position] -= self.gaps.trace.ops[position].workspace - self.least_workspace(position)
        return floor

    @property
    def least_nbytes(self) -> int:
        """Bytes that every plan needs; the least that a plan needs may be more."""
        return int(self.floor.max(initial=0.0))

    @property
    def least_beside_states(self) -> int:
        """Bytes that every plan needs even if states came and went in blocks: without these, and without workspaces."""
        change, states = np.zeros(self.size + 1), {each.storage for each in self.states}
        for life in self.captured.lifetimes:
            if life.storage in states:
                change[life.first] += life.nbytes
                change[life.last + 1] -= life.nbytes
        beside = self.in_use - np.cumsum(change)[:-1] - self.captured.by_kind["workspace"]
        return int(beside.max(initial=0.0))

    def least_workspace(self, position: int) -> int:
        """Return the fewest bytes that the op at a position allocates while it runs: an update may run in windows."""
        nbytes = self.gaps.trace.ops[position].workspace
        has_windows = self.states and position in self.update_positions
        return min(nbytes, self.machine.streaming.window) if has_windows else nbytes

    @cached_property
    def _first(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        storages, producers = [each.first_backward for each in self.storages], [self.size] * len(self.producers)
        for o in reversed(range(len(producers))):
            for i in self.producers[o].storages:
                storages[i] = min([storages[i], *(producers[w] for w in self.storages[i].readers)])
            producers[o] = min(storages[i] for i in self.producers[o].storages)
        return tuple(storages), tuple(producers)

    @property
    def first_needs(self) -> tuple[int, ...]:
        """The first backward position that needs each storage, or may recompute with it; or the number of ops."""
        return self._first[0]

    @property
    def first_reruns(self) -> tuple[int, ...]:
        """The first backward position before which each producer may be recomputed; or the number of ops."""
        return self._first[1]

    @cached_property
    def last_needs(self) -> tuple[int, ...]:
        """The last backward position that may need a reload of each storage; or the number of ops."""
        storages, producers = [each.first_backward for each in self.storages], [0] * len(self.producers)
        for o in reversed(range(len(producers))):
            for i in self.producers[o].storages:
                if storages[i] == self.size:
                    storages[i] = max((producers[w] for w in self.storages[i].readers), default=self.size)
            producers[o] = max(storages[i] for i in self.producers[o].storages)
        return tuple(storages)

    @cached_property
    def last_reruns(self) -> tuple[int, ...]:
        """The last backward position before which each producer may be recomputed; or the number of ops."""
        producers = [self.size] * len(self.producers)
        for o in reversed(range(len(producers))):
            storages = (self.storages[i] for i in self.producers[o].storages)
            needs = (need for each in storages for need in (each.first_backward, *(producers[w] for w in each.readers)))
            producers[o] = max((need for need in needs if need < self.size), default=self.size)
        return tuple(producers)

    @cached_property
    def nbytes(self) -> Floats:
        return np.array([each.nbytes for each in self.storages], dtype=np.float64)

    @cached_property
    def last_forward(self) -> Ints:
        return np.array([each.last_forward for each in self.storages], dtype=np.int64)

    @cached_property
    def first_backward(self) -> Ints:
        return np.array([each.first_backward for each in self.storages], dtype=np.int64)

    def _readers(self) -> dict[str, list[int]]:
        readers: dict[str, list[int]] = {storage: [] for storage in self.gaps.producer}
        for o, producer in enumerate(self.producers):
            if not producer.runs_once:
                reads = self.gaps.trace.op[producer.value].reads
                for storage in dict.fromkeys(held for read in reads for held in self.gaps.holds.get(read, ())):
                    readers[storage].append(o)
        return readers

    def _can_offload(self, storage: str, readers: list[int]) -> bool:
        is_needed = storage in self.gaps.whole_value and (storage in self.gaps.uses or bool(readers))
        works = self.offloads_activations and self.machine.link.works
        return is_needed and works and self.gaps.trace.nbytes[storage] >= SMALLEST_OFFLOAD


def proven_nbytes(trace: Trace, machine: Machine) -> int:
    """Return bytes that every plan needs."""
    return PlanProblem(ReuseGaps(trace), machine.joined).least_nbytes
