"""The reason why a large weight stays whole where blocks of rows were looked for.

WholeWeight("head.weight", 4194304, Reason.READ, "aten.mul.Tensor")   ->   head.weight: read by aten.mul.Tensor, ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

NAMED = 3  # weights of one reason that are named


class Reason(StrEnum):
    """The kind of a reason; `TEXTS` has its words."""

    LAYOUT = "layout"
    CAST = "cast"
    READ = "read"
    GRADIENT = "gradient"
    WATCHED = "watched"
    TERMS = "terms"
    WRITTEN = "written"
    BITS = "bits"
    ROWS = "rows"
    SMALLER = "smaller"
    FUSED = "fused"
    SHARDED = "sharded"
    HELD = "held"
    RECORDED = "recorded"


TEXTS = {
    Reason.LAYOUT: "no contiguous matrix of floats",
    Reason.CAST: "cast by {}, as under autocast",
    Reason.READ: "read by {}, which is no product with it or its transpose, and no lookup",
    Reason.GRADIENT: "its gradient is made by {}, which makes no rows of it",
    Reason.WATCHED: "autograd adds up its gradient, as for a hook, or in a process group",
    Reason.TERMS: "its gradient is a sum, and what would wait for the last term has more bytes than it",
    Reason.WRITTEN: "its gradient is a sum, and what one term is made of changes before the last one",
    Reason.BITS: 'no blocks of it have the bits of the whole on this device; slices="auto" lets sums over them round',
    Reason.ROWS: "it has too few rows for blocks of whole pages",
    Reason.SMALLER: "no larger than {}, which stays whole",
    Reason.FUSED: "updated in backward, with fuse_update=True",
    Reason.SHARDED: "its gradient is reduced over ranks by a sharded optimizer",
    Reason.HELD: "a tensor outside of the module, as of fully_shard or of a kept state_dict(), holds its memory too",
    Reason.RECORDED: "recorded steps, with cuda_graphs=True, offload no weights",
}


@dataclass(frozen=True, slots=True)
class WholeWeight:
    """A weight that stays whole.

    Attributes:
        detail: the op, or the other weight, that the reason is about.
    """

    weight: str
    nbytes: int
    reason: Reason
    detail: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", Reason(self.reason))  # saved plans have its text

    @property
    def why(self) -> str:
        return TEXTS[self.reason].format(self.detail)


def reason_lines(weights: Iterable[WholeWeight]) -> list[str]:
    """Return a line for each reason, with the largest weights that it holds for."""
    names: dict[str, list[str]] = {}
    for each in sorted(weights, key=lambda each: -each.nbytes):
        names.setdefault(each.why, []).append(each.weight)
    return [f"  {_listed(those)}: {why}" for why, those in names.items()]


def _listed(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
