"""The difference of two plans: bytes, time, and the values that they treat differently.

before.diff(after)   ->   peak 31.5 -> 24.1 MB; step 564.2 -> 590.0 ms
                          recompute -> offload   6 x aten.gelu.default   *.1   25.2 MB
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from passes import Plan, Trace

from .tables import layer_path, mb, ms, printed, stacked, table, unstyled

if TYPE_CHECKING:
    from rich.console import RenderableType

KEPT = "keep"
ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Change:
    """Values that one plan treats as `before` and the other as `after`, folded over equal layers.

    Attributes:
        before, after: "keep", "recompute", "offload", "stream", or several; "absent" if the step has no such value.
        nbytes: of all `count` values.
    """

    before: str
    after: str
    fn: str
    where: str
    nbytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """The decisions in which two plans differ, the largest values first.

    Attributes:
        budgets, peaks: bytes of both. us: microseconds of both, by forecast.
        same_step: True if both are plans of the same ops.
    """

    budgets: tuple[int, int]
    peaks: tuple[int, int]
    us: tuple[float, float]
    same_step: bool
    changes: tuple[Change, ...]

    def to_json(self) -> str:
        """Return the difference as JSON; the fields are those of this class."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        return printed(self)

    def __rich__(self) -> RenderableType:
        more = self.peaks[1] - self.peaks[0]
        lines = [
            f"budget   {_pair(self.budgets)}",
            f"forecast {_pair(self.peaks)}, {'+' * (more > 0)}{mb(more)}",
            f"step     {ms(self.us[0])} -> {ms(self.us[1])}" + (_share(*self.us)),
        ]
        if not self.same_step:
            lines.append("the steps differ: values are compared by name")
        head = unstyled("\n".join(lines))
        if not self.changes:
            return stacked(head, unstyled("both decide the same"))
        rows = table("decided differently", "before", "after", "op", "where", "bytes", right=("bytes",))
        for change in self.changes:
            fn = change.fn if change.count == 1 else f"{change.count} x {change.fn}"
            rows.add_row(change.before, change.after, fn, change.where, mb(change.nbytes))
        return stacked(head, unstyled(""), rows)


def changes(before: tuple[Trace, Plan], after: tuple[Trace, Plan]) -> tuple[Change, ...]:
    """Return what is decided differently of two steps, each given with its plan."""
    folded: dict[tuple[str, str, str, str], Change] = {}
    for change in _each_change(before, after):
        key = (change.before, change.after, change.fn, layer_path(change.where))
        if key in folded:
            total = folded[key]
            change = Change(*key, total.nbytes + change.nbytes, total.count + 1)
        folded[key] = change
    return tuple(sorted(folded.values(), key=lambda change: -change.nbytes))


def _each_change(before: tuple[Trace, Plan], after: tuple[Trace, Plan]) -> Iterator[Change]:
    """Yield each value that is decided differently; views are left out, for nothing is moved or made of them."""
    old, new = _verbs(before[1]), _verbs(after[1])
    for name in dict.fromkeys([*old, *new]):
        was, now = (_verb(name, trace, verbs) for (trace, _), verbs in ((before, old), (after, new)))
        trace = after[0] if name in after[0].op else before[0]
        op, is_copied = trace.op[name], "offload" in f"{was} {now}"
        nbytes = trace.nbytes[op.holds[0]] if is_copied else op.nbytes
        if was != now and nbytes:
            yield Change(was, now, op.fn, op.where, nbytes)


def _verbs(plan: Plan) -> dict[str, str]:
    """Map each value to what is decided of it, but for reloads, which follow from the rest."""
    verbs: dict[str, dict[str, None]] = {}
    for decision in plan:
        verb = type(decision).__name__.lower()
        if verb != "reload":
            verbs.setdefault(decision.value, {})[verb] = None
    return {value: " and ".join(found) for value, found in verbs.items()}


def _verb(name: str, trace: Trace, verbs: dict[str, str]) -> str:
    return verbs.get(name, KEPT) if name in trace.op else ABSENT


def _pair(sizes: tuple[int, int]) -> str:
    return f"{mb(sizes[0])} -> {mb(sizes[1])}"


def _share(before_us: float, after_us: float) -> str:
    return f", {after_us / before_us - 1:+.1%}" if before_us else ""
