"""Equal layers of a step: makers that come again and again with the same times, the same bytes and the same readers.

    embed | a0 b0 c0 | a1 b1 c1 | ... | a9 b9 c9 | head, loss   ->   Layers(first=1, period=3, count=10)

What counts is what can be decided: an op that makes nothing movable is of no layer.  Where a layer begins is as good as
anywhere else, as long as none reads further back than the layer before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..problem import Ints, PlanProblem


@dataclass(frozen=True, slots=True)
class EqualLayers:
    """`count` times `period` makers in a row, the first of them at index `first`."""

    first: int
    period: int
    count: int

    def of(self, maker: int) -> int:
        """The layer of a maker; below 0 or not below `count`, if it is of none."""
        return (maker - self.first) // self.period

    def makers(self, layer: int) -> range:
        begin = self.first + layer * self.period
        return range(begin, begin + self.period)

    def moved(self, maker: int, layer: int) -> int:
        """The maker in another layer that is as one in this."""
        return maker + (layer - self.of(maker)) * self.period


def find_equal_layers(program: PlanProblem, least: int) -> EqualLayers | None:
    """The equal layers that hold the most makers, if there are at least so many."""
    kinds = _kinds(program)
    best: EqualLayers | None = None
    for period in range(1, len(kinds) // least + 1):
        begin, end = _longest(kinds[period:] == kinds[:-period])
        found = EqualLayers(begin, period, (end - begin) // period + 1)
        if found.count >= least and (best is None or found.period * found.count > best.period * best.count):
            best = found
    return best if best and _reads_one_back(program, best) else None


def _kinds(program: PlanProblem) -> Ints:
    """The same number for makers of which the same can be decided."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(_kind(program, o), len(numbers)) for o in range(len(program.producers))])


def _kind(program: PlanProblem, o: int) -> object:
    maker = program.producers[o]
    made = (program.storages[i] for i in maker.storages)
    items = tuple(
        (item.nbytes, item.first_backward < program.size, tuple(w - o for w in item.readers)) for item in made
    )
    return maker.us, maker.runs_once, program.gaps.trace.op[maker.value].draws, items


def _longest(equal: Ints) -> tuple[int, int]:
    """The longest stretch in which all are equal."""
    ends = np.flatnonzero(np.diff(np.concatenate(([0], equal.astype(np.int8), [0]))))
    if not len(ends):
        return 0, 0
    best = int(np.argmax(ends[1::2] - ends[::2]))
    return int(ends[2 * best]), int(ends[2 * best + 1])


def _reads_one_back(program: PlanProblem, found: EqualLayers) -> bool:
    """Whether layers read of each other only the one before them, and else only what backward reads as well."""
    for item in program.storages:
        mine, read = found.of(item.producer), [found.of(w) for w in item.readers]
        inside = [layer for layer in read if 0 <= layer < found.count]
        if 0 <= mine < found.count:
            if any(layer > mine + 1 for layer in inside) or (mine + 1 < found.count and len(inside) < len(read)):
                return False
        elif item.first_backward == program.size and any(layer > 0 for layer in inside):
            return False
    return True
