"""Why a plan does with a value what it does: each choice, and what is proven of it.

report.explain("layers.3.mlp")   ->   gelu_3: aten.gelu.default at layers.3.mlp, 2.1 MB
                                      recompute  207.0 ms   chosen; this plan takes 209.2 ms
                                      keep       208.4 ms   not proven to be slower than this plan
                                      offload    209.6 ms   slower than this plan, by 0.4 ms or more
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from passes import Machine
from passes.choices import Choice, first_choices, named_values
from passes.lp import solver
from passes.simulate.plan_result import PlanResult

from ..errors import PlanError
from .tables import Printed, mb, ms, stacked, table, unstyled

if TYPE_CHECKING:
    from rich.console import RenderableType

NAMED = 6  # further values that are printed
NEGLIGIBLE = 1e-4  # share of a step


@dataclass(frozen=True, slots=True)
class Explanation(Printed):
    """The choices for one value.

    Attributes:
        value: its name in the plan. nbytes: of its memory, which views of it share.
        us: microseconds of the step with this plan, by forecast.
        others: further values that the submodule makes, if its path was given: the largest first.
        choices: what the plan has chosen first; `least_us` compares them, as all are bounds of the same kind.
    """

    value: str
    fn: str
    where: str
    nbytes: int
    us: float
    choices: tuple[Choice, ...]
    others: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return it as JSON; the fields are those of this class. Where no plan has a choice, `least_us` is null."""
        facts = asdict(self)
        for choice in facts["choices"]:
            choice["least_us"] = choice["least_us"] if math.isfinite(choice["least_us"]) else None
        return json.dumps(facts, indent=1)

    def __rich__(self) -> RenderableType:
        head = f"{self.value}: {self.fn}{' at ' + self.where if self.where else ''}, {mb(self.nbytes)}"
        rows = table("", "choice", "no plan takes less than", "", right=("no plan takes less than",))
        for choice in self.choices:
            least = ms(choice.least_us) if math.isfinite(choice.least_us) else "-"
            rows.add_row(choice.kind, least, self._told(choice))
        return stacked(unstyled(head), rows, *self._others())

    def _others(self) -> list[RenderableType]:
        if not self.others:
            return []
        names = ", ".join(self.others[:NAMED]) + ", ..." * (len(self.others) > NAMED)
        return [unstyled(f"{len(self.others) + 1} values are made there; the others are {names}")]

    def _told(self, choice: Choice) -> str:
        if choice.taken:
            return f"chosen; this plan takes {ms(self.us)}"
        if choice.why_not:
            return choice.why_not
        more = choice.least_us - self.us
        if more <= NEGLIGIBLE * self.us:
            return "not proven to be slower than this plan"
        return f"slower than this plan, by {ms(more)} or more"


def explain(result: PlanResult, machine: Machine, name: str, choice: str | None = None) -> Explanation:
    """Return the choices for a value, or that of one kind beside what the plan has chosen.

    Raises:
        TypeError: the name is no text.
        ValueError: there is no such value or choice, or nothing is decided of it.
        PlanError: HiGHS, which proves it, is not installed.
    """
    if not solver.is_installed():
        raise PlanError(f"{solver.MISSING}, which proves what a choice costs; {solver.INSTALL}")
    if not isinstance(name, str):
        raise TypeError(f"the value is a {type(name).__name__}; give its name in the plan, or the path of a submodule")
    trace = result.captured.trace
    named = named_values(trace, name)
    value, found = first_choices(result, machine, named, choice)
    op, others = trace.op[value], tuple(each for each in named if each != value)
    return Explanation(value, op.fn, op.where, trace.nbytes[op.holds[0]], result.forecast.us, found, others)
