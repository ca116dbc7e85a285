"""Give each storage that a step allocates an address in one block of memory.

    a = relu(x)      # 4 MB, live from 0 to 3         a at 2 MB
    b = mm(a, w)     # 2 MB, live from 1 to 2         b at 0
    c = mm(b, w)     # 2 MB, live from 2 to 3    ->   c at 6 MB       block 8 MB, live at once 8 MB, lost 0
    g = mul(c, a)    # 2 MB, live from 3 on           g at 0

Largest first, each storage takes the smallest gap that it fits into, between the storages that are live while it is.
Where that loses too much, the order of the large ones is changed at random, and kept if the block is not larger.  An
allocator that learns of storages one by one can't do that.  `check` proves that no two live storages overlap.

Inputs are not in the block, for the caller has them: parameters, states, batch, and gradients that exist already.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..ir.arrays import Ints
from .forecast import Forecast

ALIGNMENT = 512  # bytes: torch's CUDA allocator gives out multiples of it
ROUNDS = 300  # of a search, where the first placements lose too much
ENOUGH = 0.001  # of what is live at once may be lost
LARGE = 128  # a slot is large with this part of what is live at once
TRIED = 0.1  # of the moves that change no height are tried with all slots
ENDLESS = np.iinfo(np.int64).max


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


# What comes first: the largest, what is large and lives long, or what lives longest.
ORDERS: tuple[Callable[[Slot], tuple[int, ...]], ...] = (
    lambda slot: (-slot.nbytes, slot.first - slot.last),
    lambda slot: (-slot.nbytes * (slot.last - slot.first + 1),),
    lambda slot: (slot.first - slot.last, -slot.nbytes),
)


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


def place(forecast: Forecast, alignment: int = ALIGNMENT, rounds: int = ROUNDS) -> Arena:
    """Return the block of a step, with the addresses of all that it allocates; `rounds` bound the search."""
    slots = allocated(forecast, alignment)
    live = _most_live(slots)
    enough = int(live * (1 + ENOUGH))
    orders = [_sorted(slots, first) for first in ORDERS]
    packed = min((_packed(slots, order) for order in orders), key=lambda packed: packed.height)
    if packed.height > enough:
        packed = min(packed, _improved(slots, orders[0], live, enough, rounds), key=lambda packed: packed.height)
    return Arena(tuple(replace(slot, address=at) for slot, at in zip(slots, packed.addresses.tolist(), strict=True)))


def _sorted(slots: Sequence[Slot], first: Callable[[Slot], tuple[int, ...]]) -> list[int]:
    return sorted(range(len(slots)), key=lambda i: first(slots[i]))


@dataclass(frozen=True, eq=False)
class _Packed:
    """Addresses, and the ends of the slots there."""

    order: Sequence[int]
    addresses: Ints
    ends: Ints

    @property
    def height(self) -> int:
        return int(self.ends.max(initial=0))


def _packed(slots: Sequence[Slot], order: Sequence[int]) -> _Packed:
    addresses = _placed(slots, order)
    return _Packed(order, addresses, addresses + _arrays(slots)[2])


def _improved(slots: Sequence[Slot], order: Sequence[int], live: int, enough: int, rounds: int) -> _Packed:
    """Move large slots to other places in the order, and keep what makes the block no larger.

    The small ones follow. They fill gaps, and to place them takes most of the time.
    """
    large = [slots[i] for i in order if slots[i].nbytes * LARGE >= live]
    draw, least = random.Random(0), _most_live(large)
    best = _packed(slots, order)
    now = _packed(large, range(len(large)))
    for _ in range(rounds if large else 0):
        new = _packed(large, _moved(now, least, draw))
        if new.height > max(now.height, live):
            continue
        if new.height < now.height or draw.random() < TRIED:
            whole = _packed(slots, [*(order[k] for k in new.order), *order[len(large) :]])
            if whole.height > best.height and new.height >= now.height:
                continue
            best = min(best, whole, key=lambda packed: packed.height)
            if best.height <= enough:
                break
        now = new
    return best


def _moved(packed: _Packed, least: int, draw: random.Random) -> list[int]:
    """Return the order with one slot elsewhere: any, or one that ends too high before others."""
    order, high = list(packed.order), np.flatnonzero(packed.ends > least).tolist()
    if high and draw.random() < 0.5:
        at = order.index(draw.choice(high))
        order.insert(draw.randrange(max(1, at)), order.pop(at))
    else:
        slot = order.pop(draw.randrange(len(order)))
        order.insert(draw.randrange(len(order) + 1), slot)
    return order


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


def _placed(slots: Sequence[Slot], order: Sequence[int]) -> Ints:
    """Return addresses: in this order, each slot takes the smallest gap between those that are live while it is."""
    first, last, nbytes = _arrays(slots)
    addresses = np.full(len(slots), -1, dtype=np.int64)
    for i in order:
        beside = np.flatnonzero((addresses >= 0) & (first <= last[i]) & (last >= first[i]))
        beside = beside[np.argsort(addresses[beside], kind="stable")]
        begins = np.concatenate(([0], np.maximum.accumulate(addresses[beside] + nbytes[beside])))
        gaps = np.append(addresses[beside], ENDLESS) - begins  # the last one is above all
        addresses[i] = begins[np.argmin(np.where(gaps >= nbytes[i], gaps, ENDLESS))]
    return addresses


def _arrays(slots: Sequence[Slot]) -> tuple[Ints, Ints, Ints]:
    facts = np.array([(slot.first, slot.last, slot.nbytes) for slot in slots], dtype=np.int64).reshape(-1, 3)
    return facts[:, 0], facts[:, 1], facts[:, 2]


def _most_live(slots: Sequence[Slot]) -> int:
    first, last, nbytes = _arrays(slots)
    change = np.zeros(int(last.max(initial=0)) + 2, dtype=np.int64)
    np.add.at(change, first, nbytes)
    np.subtract.at(change, last + 1, nbytes)
    return int(np.cumsum(change).max())
