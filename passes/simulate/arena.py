"""Give each storage that a step allocates an address in one block of memory.

    a = relu(x)      # 4 MB, live from 0 to 3         a at 2 MB
    b = mm(a, w)     # 2 MB, live from 1 to 2         b at 0
    c = mm(b, w)     # 2 MB, live from 2 to 3    ->   c at 6 MB       block 8 MB, live at once 8 MB, lost 0
    g = mul(c, a)    # 2 MB, live from 3 on           g at 0

The block is filled from below.  Over time, what is placed so far has a skyline; its lowest part takes, of the storages
that live within it, the one that lives longest.  If none does, the part is lifted to the lower of its neighbours.
Where that loses too much, lifetimes get random weights, and the best placement is kept.  `check` proves that no two
live storages overlap.

Inputs are not in the block, for the caller has them: parameters, states, batch, and gradients that exist already.

Source: Sekiyama, Imai, Negishi, Kawachiya: Profile-guided memory optimization for deep neural networks,
arXiv:1804.10001.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..ir.arrays import Floats, Ints
from .forecast import Forecast

ALIGNMENT = 512  # bytes: torch's CUDA allocator gives out multiples of it
ROUNDS = 300  # of a search, where the first placement loses too much
ENOUGH = 0.001  # of what is live at once may be lost
SPREAD, CHANGED = 0.3, 0.1  # of the weights: the most of a logarithm's deviation, and the share that is changed


@dataclass(frozen=True, slots=True)
class Slot:
    """A storage or a workspace, the first and last op of its lifetime, and its address in the block."""

    name: str
    nbytes: int
    first: int
    last: int
    address: int = 0

    @property
    def end(self) -> int:
        return self.address + self.nbytes


@dataclass(frozen=True)
class Arena:
    """The block of a step."""

    slots: tuple[Slot, ...]

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the block."""
        return max((slot.end for slot in self.slots), default=0)

    @cached_property
    def live(self) -> int:
        """The most bytes that are live at once."""
        return _most_live(self.slots)

    @property
    def lost(self) -> int:
        """The bytes that are between storages when the most are live."""
        return self.nbytes - self.live

    def check(self) -> None:
        """Prove that no two storages that are live at the same op overlap.

        Raises:
            ValueError: two do.
        """
        first, last, nbytes = _arrays(self.slots)
        address = np.array([slot.address for slot in self.slots], dtype=np.int64)
        for i, slot in enumerate(self.slots):
            both = (first[:i] <= slot.last) & (last[:i] >= slot.first)
            meet = both & (address[:i] < slot.end) & (address[:i] + nbytes[:i] > slot.address)
            if meet.any():
                raise ValueError(f"{self.slots[int(np.argmax(meet))]} and {slot} are live at one op, and overlap")


def place(slots: Sequence[Slot], rounds: int = ROUNDS, seed: int = 0) -> Arena:
    """Return the block of a step that allocates this, with all addresses.

    Args:
        rounds: bound the search.
        seed: of random weights; without one, lifetimes as they are come first.
    """
    if not slots:
        return Arena(())
    first, last, nbytes = _arrays(slots)
    enough = _most_live(slots) * (1 + ENOUGH)
    length, draw = (last - first + 1).astype(float), np.random.default_rng(seed)
    weights = np.exp(draw.normal(0, SPREAD * bool(seed), len(slots)))
    best = _filled(first, last, nbytes, length * weights)
    for i in range(rounds):
        if best.height <= enough:
            break
        new = np.exp(draw.normal(0, SPREAD * draw.random(), len(slots)))
        if i % 2:  # near the best ones
            new = weights * np.where(draw.random(len(slots)) < CHANGED, new, 1.0)
        filled = _filled(first, last, nbytes, length * new)
        if filled.height <= best.height:
            best, weights = filled, new
    return Arena(tuple(replace(slot, address=at) for slot, at in zip(slots, best.addresses.tolist(), strict=True)))


@dataclass(frozen=True, eq=False)
class _Filled:
    """A block with all slots in it."""

    addresses: Ints
    height: int


def _filled(first: Ints, last: Ints, nbytes: Ints, rank: Floats) -> _Filled:
    """Fill a block: of the slots that the lowest part of the skyline has room for, it takes that of highest rank."""
    addresses, rank, skyline, height = np.zeros_like(first), rank.copy(), _Skyline(int(last.max()) + 1), 0
    for _ in range(len(first)):
        while True:
            begin, end, low = skyline.lowest()
            fitting = np.where((first >= begin) & (last < end), rank, 0.0)
            chosen = int(fitting.argmax())
            if fitting[chosen]:
                break
            skyline.lift()
        rank[chosen], addresses[chosen] = 0.0, low
        skyline.put(int(first[chosen]), int(last[chosen]) + 1, low + int(nbytes[chosen]))
        height = max(height, low + int(nbytes[chosen]))
    return _Filled(addresses, height)


class _Skyline:
    """The height over time of what is placed, in parts of one height each."""

    def __init__(self, end: int) -> None:
        self.begins, self.heights, self.end = [0], [0], end

    def lowest(self) -> tuple[int, int, int]:
        """Return begin, end and height of the lowest part."""
        self.at = self.heights.index(min(self.heights))
        return self.begins[self.at], self._end(self.at), self.heights[self.at]

    def lift(self) -> None:
        """Lift the lowest part to the lower of its neighbours."""
        self.heights[self.at] = min(
            self.heights[max(self.at - 1, 0) : self.at] + self.heights[self.at + 1 : self.at + 2]
        )
        self._join(self.at)

    def put(self, begin: int, end: int, height: int) -> None:
        """Give some of the lowest part another height."""
        low, low_end, low_height = self.begins[self.at], self._end(self.at), self.heights[self.at]
        parts = [(low, low_height)] * (low < begin) + [(begin, height)] + [(end, low_height)] * (end < low_end)
        self.begins[self.at : self.at + 1] = [begin for begin, _ in parts]
        self.heights[self.at : self.at + 1] = [height for _, height in parts]
        self._join(self.at + (low < begin))

    def _end(self, at: int) -> int:
        return self.begins[at + 1] if at + 1 < len(self.begins) else self.end

    def _join(self, at: int) -> None:
        """Make one part of this and of neighbours that are as high."""
        for i in (at + 1, at):
            if 0 < i < len(self.heights) and self.heights[i - 1] == self.heights[i]:
                del self.begins[i], self.heights[i]


def allocated(forecast: Forecast, alignment: int) -> tuple[Slot, ...]:
    """Return what the step allocates, as the forecast counts it, in whole units of the allocator."""
    trace, found = forecast.trace, list[Slot]()
    for life in forecast.lifetimes:
        if life.nbytes > 0 and not trace.op[life.producer].is_input:
            found.append(Slot(life.storage, life.nbytes, life.first, life.last))
    for index, nbytes in enumerate(forecast.by_kind["workspace"].tolist()):
        if nbytes > 0:
            found.append(Slot(f"workspace of {trace.ops[index].name}", nbytes, index, index))
    if forecast.staging:
        found.append(Slot("staging", forecast.staging, 0, len(trace.ops) - 1))
    return tuple(Slot(slot.name, -(-slot.nbytes // alignment) * alignment, slot.first, slot.last) for slot in found)


def _arrays(slots: Sequence[Slot]) -> tuple[Ints, Ints, Ints]:
    facts = np.array([(slot.first, slot.last, slot.nbytes) for slot in slots], dtype=np.int64).reshape(-1, 3)
    return facts[:, 0], facts[:, 1], facts[:, 2]


def _most_live(slots: Sequence[Slot]) -> int:
    first, last, nbytes = _arrays(slots)
    change = np.zeros(int(last.max(initial=0)) + 2, dtype=np.int64)
    np.add.at(change, first, nbytes)
    np.subtract.at(change, last + 1, nbytes)
    return int(np.cumsum(change).max())
