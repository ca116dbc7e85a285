"""What has to run again before the ops of backward, where values are made again as often as need be.

drop({x}); make((c,), place of g)   ->   Recompute("b", before="g"), Recompute("c", before="g")    c of b, b of x
"""

from __future__ import annotations

from collections.abc import Iterable

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.decisions import Recompute


class RecomputeOrder:
    """Walks backward; `there` are the forward values that can be read without making anything again."""

    def __init__(self, gaps: ReuseGaps, made: frozenset[str]) -> None:
        """`made`: the storages that may be made again."""
        self.gaps = gaps
        self.made = made
        self.there = set(gaps.holds)
        self.decisions: list[Recompute] = []

    def drop(self, held: frozenset[str]) -> None:
        """Forget the values whose bytes are not held; what may not be made again stays."""
        storages = self.gaps.holds
        self.there = {value for value in self.there if all(s in held or s not in self.made for s in storages[value])}

    def whole_value(self, storage: str) -> str:
        """The value that is there if `storage` is: what its op makes, or the part of that which is `storage` alone."""
        maker = self.gaps.producer[storage]
        if self.gaps.holds[maker] == (storage,):
            return maker
        return next((part for part in self.gaps.getitems.get(maker, ()) if self.gaps.holds[part] == (storage,)), maker)

    def recompute(self, values: Iterable[str], index: int, wanted: frozenset[str]) -> None:
        """Make the values be there for the op at `index`, and before them what they are made from."""
        todo, missing = list(values), set[str]()
        while todo:
            value = todo.pop()
            if value not in self.there and value not in missing:
                missing.add(value)
                todo += [read for read in self.gaps.trace.op[value].reads if read in self.gaps.holds]
                # A part that is wanted is taken out at once: all the parts lie there until the last is.
                todo += [part for part in self.gaps.getitems.get(value, ()) if wanted.issuperset(self.gaps.holds[part])]
        place = self.gaps.trace.ops[index].name
        self.decisions += [Recompute(value, place) for value in sorted(missing, key=self.gaps.index.__getitem__)]
        self.there |= missing
