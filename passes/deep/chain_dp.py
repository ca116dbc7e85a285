"""Decide how often to run each section of a chain, for the least time within a number of bytes.

    undo(s, t):  run s and keep what its backward reads;  undo(s + 1, t);  backward of s
    or           run s ... k - 1 and keep only the storages at the beginning of k;  undo(k, t);  undo(s, k - 1)
    or           run s ... t and keep only what backward of t reads;  backward of t;  undo(s, t - 1)

A dynamic programme over slots of bytes, in the manner of Beaumont et al., "Optimal checkpointing for heterogeneous
chains".  The bytes at the beginning of s are not counted within undo(s, t).  The first run, of segments that reach the
end of the chain, is that of the step itself, and costs nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..analysis.chain_sections import Sections
from ..ir.arrays import Ints

Table = npt.NDArray[np.float32]
HeldValues = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ChainStep:
    """Backward of a section, and the storages on the device when it begins.

    `held` names sections: ("crossing", j) for what lies at the beginning of j, ("kept", j) for what j keeps.
    """

    section: int
    held: HeldValues


@dataclass(frozen=True, eq=False)
class Needs:
    """The exact bytes of each step of a chain: those that no section moves, and those beside `held`."""

    sections: Sections

    @cached_property
    def kept_peak(self) -> Ints:
        return self.sections.own_peak(self.sections.kept)

    @cached_property
    def needed_peak(self) -> Ints:
        return self.sections.own_peak(self.sections.needed)

    def leaf(self, s: int) -> Ints:
        """Run sections s ... t for backward of t alone, and undo t: for each t from s on."""
        x = self.sections
        before = np.maximum.accumulate(np.append(0, x.forward_peak[s, s:-1]))
        run = np.maximum(before, x.added_nbytes[s, s:-1] + self.needed_peak[s:])
        return np.maximum(x.base[s:] + run, x.backward_peak[s, s:])

    def keep(self, s: int) -> Ints:
        """Run section s and keep what backward reads, before undoing t: for each t behind s.  Undo it afterwards."""
        x = self.sections
        return np.maximum(x.base[s + 1 :] + self.kept_peak[s], x.backward_peak[s, s])

    def run(self, s: int) -> Ints:
        """[k, t] with both counted from s + 1: run sections s ... k - 1 before undoing t."""
        x = self.sections
        return np.maximum.accumulate(x.forward_peak[s, s:-1])[:, None] + x.base[None, s + 1 :]

    @cached_property
    def floor(self) -> int:
        """Return the fewest bytes in which backward of the chain can run."""
        x, n = self.sections, self.sections.count
        least = np.zeros((n, n), np.int64)
        for s in range(n - 1, -1, -1):
            row, leaf, run = least[s], self.leaf(s), self.run(s)
            row[s] = leaf[0]
            if s + 1 < n:
                row[s + 1 :] = np.maximum(self.keep(s), x.kept_nbytes[s] + least[s + 1, s + 1 :])
            for k in range(s + 1, n):
                most = np.maximum(run[k - s - 1, k - s - 1 :], x.added_nbytes[s, k] + least[k, k:])
                row[k:] = np.minimum(row[k:], np.maximum(most, row[k - 1]))
                row[k] = min(row[k], max(leaf[k - s], row[k - 1]))
        return int(least[0, -1])


class ChainDP:
    """The least time of backward of each segment in each number of slots; `slots` of them make `top` bytes.

    A table that is not full at `until`, as `time.monotonic` has it, says of the whole chain that it can't be undone.
    """

    def __init__(self, needs: Needs, top: int, slots: int, until: float = math.inf) -> None:
        self.until = until
        self.sections = x = needs.sections
        self.needs = needs
        self.origin = int(x.base.min())  # is there throughout, and takes no slots
        self.unit = max(1, -(-(top - self.origin) // slots))
        self.size = slots + 1
        # Rounded up on the whole, not one by one: of many sections that are kept, half a slot each would be lost.
        self.kept = np.diff(self._slots(np.cumsum(np.append(0, x.kept_nbytes))))
        self.added = self._slots(x.added_nbytes)
        self.none_us = np.cumsum(np.append(0.0, x.us(x.crossing[1:])))
        self.keep_us = x.us(x.kept)
        self.leaf_us = x.us(x.needed)
        self.us = self._table()

    def undo(self, slots: int) -> tuple[ChainStep, ...]:
        """Return the backward of each section, in order; nothing if that takes more slots."""
        if not np.isfinite(self.us[0, -1, slots]):
            return ()
        return tuple(self._walk(0, self.sections.count - 1, slots, ()))

    def place(self, nbytes: int) -> int:
        """Return the number of slots for so many bytes, at most all."""
        return min(max(0, (nbytes - self.origin) // self.unit), self.size - 1)

    @property
    def least(self) -> int:
        """Return the fewest slots in which backward of the chain can run; all of them if it cannot."""
        can = np.flatnonzero(np.isfinite(self.us[0, -1]))
        return int(can[0]) if len(can) else self.size - 1

    def _slots(self, nbytes: Ints) -> Ints:
        return -(-nbytes // self.unit)

    def _from(self, nbytes: Ints) -> Ints:
        """Return the number of slots from which on so many bytes fit."""
        return np.clip(self._slots(nbytes - self.origin), 0, self.size)

    def _table(self) -> Table:
        n = self.sections.count
        table = np.full((n, n, self.size), np.inf, np.float32)
        first = np.full((n, n), self.size)  # the fewest slots in which each segment can be undone
        for s in range(n - 1, -1, -1):
            if time.monotonic() >= self.until:
                break
            self._fill(table, first, s)
            finite = np.isfinite(table[s])
            first[s] = np.where(finite.any(axis=1), finite.argmax(axis=1), self.size)
        return table

    def _fill(self, table: Table, first: Ints, s: int) -> None:
        """Fill the table for segments that begin with section s, given those that begin later."""
        n, kept = self.sections.count, int(self.kept[s])
        leaf = self._from(self.needs.leaf(s))
        table[s, s, leaf[0] :] = self.leaf_us[s] if s + 1 < n else 0.0
        if s + 1 < n and kept < self.size:
            table[s, s + 1 :, kept:] = table[s + 1, s + 1 :, : self.size - kept]
            table[s, s + 1 : n - 1] += np.float32(self.keep_us[s])
            table[s, s + 1 :][np.arange(self.size) < self._from(self.needs.keep(s))[:, None]] = np.inf
        run = self._from(self.needs.run(s))
        for k in range(s + 1, n):
            added = int(self.added[s, k])
            if added < self.size:
                us = np.float32(self.none_us[k] - self.none_us[s])
                found = table[k, k:, : self.size - added] + (table[s, k - 1, added:] + us)
                found[-1] -= us
                need = run[k - s - 1, k - s - 1 :] - added
                for row in np.flatnonzero(need > first[k, k:]):
                    found[row, : need[row]] = np.inf
                old = table[s, k:, added:]
                np.minimum(old, found, out=old)
            us = np.float32(self.none_us[k] - self.none_us[s] + self.leaf_us[k]) if k + 1 < n else np.float32(0.0)
            alone = table[s, k - 1, leaf[k - s] :] + us
            np.minimum(table[s, k, leaf[k - s] :], alone, out=table[s, k, leaf[k - s] :])

    def _walk(self, s: int, t: int, slots: int, held: HeldValues) -> Iterator[ChainStep]:
        k = self._choice(s, t, slots)
        if k > t:
            yield ChainStep(t, held)
            if t > s:
                yield from self._walk(s, t - 1, slots, held)
        elif k == s:
            kept = (*held, ("kept", s))
            yield from self._walk(s + 1, t, slots - int(self.kept[s]), kept)
            yield ChainStep(s, kept)
        else:
            yield from self._walk(k, t, slots - int(self.added[s, k]), (*held, ("crossing", k)))
            yield from self._walk(s, k - 1, slots, held)

    def _choice(self, s: int, t: int, slots: int) -> int:
        """Return the section up to which to run: t + 1 for backward of t only, s to keep what backward of s reads."""
        if s == t:
            return t + 1
        paid = t + 1 == self.sections.count
        best, least = t + 1, np.inf
        if slots >= self._from(self.needs.leaf(s))[t - s]:
            least = self.us[s, t - 1, slots]
            least += 0.0 if paid else self.none_us[t] - self.none_us[s] + self.leaf_us[t]
        if slots >= max(self.kept[s], self._from(self.needs.keep(s))[t - s - 1]):
            us = self.us[s + 1, t, slots - self.kept[s]] + (0.0 if paid else self.keep_us[s])
            if us < least:
                best, least = s, us
        run = self._from(self.needs.run(s)[:, t - s - 1])
        for k in range(s + 1, t + 1):
            if slots >= max(self.added[s, k], run[k - s - 1]):
                us = self.us[k, t, slots - self.added[s, k]] + self.us[s, k - 1, slots]
                us += 0.0 if paid else self.none_us[k] - self.none_us[s]
                if us < least:
                    best, least = k, us
        return best
