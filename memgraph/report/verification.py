"""The bounds of a saved plan, derived again from its dual values without a solver.

verify(saved)   ->   the step takes 5200.0 us at least for any plan of its class: proven 5148.0, claimed 5148.0
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from passes import BoundProof, BrokenTrace, proven_us

from ..errors import PlanError
from .saved_plan import REPLAN, SavedPlan, carried_out
from .tables import ms, unstyled

if TYPE_CHECKING:
    from rich.console import RenderableType

CLASSES = {
    "once": "in which each value is recomputed and reloaded at most once",
    "any_plan": "that recomputes in backward only, however often",
}
EXACT = 1e-9  # share of the step by which floats of a claim may exceed what is derived in fractions


@dataclass(frozen=True, slots=True)
class Derived:
    """A bound of a class of plans.

    Attributes:
        plans: the class, of CLASSES.
        claimed_us: microseconds that the file says every such plan adds to the step.
        proven_us: what its dual values prove; None if it has none for this class.
    """

    plans: str
    claimed_us: float
    proven_us: float | None

    def holds(self, step_us: float) -> bool:
        """Return True if as much is proven as is claimed."""
        return self.claimed_us == 0 or (self.proven_us or 0.0) >= self.claimed_us - EXACT * step_us


@dataclass(frozen=True, slots=True)
class Verification:
    """Figures of a saved plan that were derived again: peak and time by simulation, the bound by exact arithmetic.

    Attributes:
        budget, peak: bytes. plain_us, us: microseconds of the step without decisions, and with them.
        bound: of the class of this plan.
    """

    budget: int
    peak: int
    plain_us: float
    us: float
    bound: Derived

    @property
    def holds(self) -> bool:
        """True if the plan fits its budget and all that is claimed is proven."""
        return self.peak <= self.budget and self.bound.holds(self.plain_us)

    def to_json(self) -> str:
        """Return the facts as JSON."""
        return json.dumps({**asdict(self), "holds": self.holds}, indent=1)

    def __rich__(self) -> RenderableType:
        fits = "fits" if self.peak <= self.budget else "does not fit"
        taken = f"by simulation of the {ms(self.us)} that it takes"
        lines = [f"{fits}: {self.peak} of {self.budget} bytes, {taken}"]
        return unstyled("\n".join([*lines, *self._bound_lines()]))

    def _bound_lines(self) -> list[str]:
        bound, step = self.bound, self.plain_us
        if bound.claimed_us == 0:
            return ["no bound is claimed but the time of the step as it is"]
        least = step + max(0.0, bound.proven_us or 0.0)  # no plan takes less time than the step as it is
        gap = f"this one is {self.us / least - 1:.2%} above" if least else ""
        lines = [f"proven without a solver: no plan {CLASSES[bound.plans]} takes less than {ms(least)}; {gap}"]
        if not bound.holds(step):
            rest = f"the file claims {ms(step + bound.claimed_us)}, the rest by a search of whole numbers"
            lines.append(f"{rest}, which leaves no dual values to check")
        return lines


def verify(saved: SavedPlan) -> Verification:
    """Carry out a saved plan on its step, simulate it, and derive its bound.

    Raises:
        PlanError: the plan can't be carried out on its step, or its proof is of another step.
    """
    try:
        result = carried_out(saved)
        bound = _derived(saved, "once" if result.is_single else "any_plan")
    except (BrokenTrace, KeyError, ValueError) as error:
        raise PlanError(f"the saved plan can't be verified: {type(error).__name__}: {error}; {REPLAN}") from error
    peak, us = result.forecast.peak, result.forecast.us
    return Verification(saved.machine.budget, peak, result.captured.us, us, bound)


def _derived(saved: SavedPlan, plans: str) -> Derived:
    proof: BoundProof | None = getattr(saved.proofs, plans)
    claimed_us = saved.bound_us if plans == "once" else saved.any_us
    proven = None if proof is None else proven_us(saved.step, saved.machine, proof)
    return Derived(plans, claimed_us, None if proven is None or not math.isfinite(proven) else proven)
