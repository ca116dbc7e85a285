"""A proof of a bound on the time that plans add: dual values of a linear program.

BoundProof(added=(("once", 812), ...), row_count=1871, duals={3: 1.25, ...})   ->   `passes.proven_us` derives the bound
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

TINY = 1e-12  # a dual value this small proves nothing, and takes place in a file


@dataclass(frozen=True)
class BoundProof:
    """Dual values of a linear program, and the rows that it had beside those of every plan.

    Attributes:
        added: kind and position of the rows that were added to the program, in order.
        row_count: number of its rows, so that another program is not taken for it.
        duals: dual value of each row by index, without zeros.
    """

    added: tuple[tuple[str, int], ...]
    row_count: int
    duals: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, added: Iterable[tuple[str, int]], duals: Iterable[float]) -> BoundProof:
        """Return the proof that the duals of a solved program are."""
        every = [float(dual) for dual in duals]
        return cls(tuple(added), len(every), {row: dual for row, dual in enumerate(every) if abs(dual) > TINY})


@dataclass(frozen=True)
class BoundProofs:
    """The proofs of both bounds of a plan, as far as a linear program proves them.

    Attributes:
        once: of plans that recompute and reload each value at most once.
        any_plan: of plans that recompute in backward only, however often.
    """

    once: BoundProof | None = None
    any_plan: BoundProof | None = None

    def __str__(self) -> str:
        return json.dumps([_facts(self.once), _facts(self.any_plan)], separators=(",", ":"))


NO_PROOFS = BoundProofs()


def parse_proofs(text: str) -> BoundProofs:
    """Return the proofs that `text` prints.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    once, any_plan = json.loads(text)
    return BoundProofs(_proof(once), _proof(any_plan))


def _facts(proof: BoundProof | None) -> dict[str, Any] | None:
    if proof is None:
        return None
    return {"added": proof.added, "row_count": proof.row_count, "duals": list(proof.duals.items())}


def _proof(facts: dict[str, Any] | None) -> BoundProof | None:
    if facts is None:
        return None
    added = tuple((str(kind), int(position)) for kind, position in facts["added"])
    return BoundProof(added, int(facts["row_count"]), {int(row): float(dual) for row, dual in facts["duals"]})
