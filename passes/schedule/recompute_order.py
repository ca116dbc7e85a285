"""Order the ops to recompute before the ops of backward, as often as needed.

drop({x}); recompute((c,), index of g)   ->   Recompute("b", before="g"), Recompute("c", before="g")    c of b, b of x
"""

from __future__ import annotations

from collections.abc import Iterable

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.decisions import Recompute


class RecomputeOrder:
    """Walks backward; `available` are the forward values that can be read without a recompute."""

    def __init__(self, gaps: ReuseGaps, recomputable: frozenset[str]) -> None:
        self.gaps = gaps
        self.recomputable = recomputable
        self.available = set(gaps.holds)
        self.decisions: list[Recompute] = []

    def drop(self, held: frozenset[str]) -> None:
        """Free the values of storages that are not `held`, but for those that may not be recomputed."""
        storages = self.gaps.holds
        self.available = {
            value for value in self.available if all(s in held or s not in self.recomputable for s in storages[value])
        }

    def whole_value(self, storage: str) -> str:
        """Return the value that holds `storage` alone: the result of its op, or an item of that."""
        producer = self.gaps.producer[storage]
        if self.gaps.holds[producer] == (storage,):
            return producer
        return next(
            (item for item in self.gaps.getitems.get(producer, ()) if self.gaps.holds[item] == (storage,)), producer
        )

    def recompute(self, values: Iterable[str], index: int, wanted: frozenset[str]) -> None:
        """Recompute values for the op at `index`, and before them what they need."""
        todo, missing = list(values), set[str]()
        while todo:
            value = todo.pop()
            if value not in self.available and value not in missing:
                missing.add(value)
                todo += [read for read in self.gaps.trace.op[value].reads if read in self.gaps.holds]
                # Wanted items are taken out at once: the whole tuple is live until the last is.
                todo += [item for item in self.gaps.getitems.get(value, ()) if wanted.issuperset(self.gaps.holds[item])]
        place = self.gaps.trace.ops[index].name
        self.decisions += [Recompute(value, place) for value in sorted(missing, key=self.gaps.trace.index.__getitem__)]
        self.available |= missing
