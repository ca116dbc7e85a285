"""A step as text, and what to do about its bytes.  Knows no torch."""

from .ir.decisions import Decision, Offload, Plan, Recompute, Reload, Stream, apply, parse_plan
from .ir.errors import BudgetError
from .ir.invariants import BrokenTrace, check
from .ir.liveness import Lifetime, lifetimes
from .ir.machine import Cast, Link, Machine, Network, Streaming
from .ir.trace import INPUTS, Op, Storage, Trace, parse
from .lp.problem import proven_nbytes
from .lp.verify_bound import proven_us
from .pipeline import PASSES, make_plan
from .simulate.bound_proof import NO_PROOFS, BoundProof, BoundProofs, parse_proofs
from .simulate.forecast import KINDS, Copy, Forecast, predict
from .simulate.plan_result import PlanResult, Proposal

__all__ = [
    "INPUTS",
    "KINDS",
    "NO_PROOFS",
    "PASSES",
    "BoundProof",
    "BoundProofs",
    "BrokenTrace",
    "BudgetError",
    "Cast",
    "Copy",
    "Decision",
    "Forecast",
    "Lifetime",
    "Link",
    "Machine",
    "Network",
    "Offload",
    "Op",
    "Plan",
    "PlanResult",
    "Proposal",
    "Recompute",
    "Reload",
    "Storage",
    "Stream",
    "Streaming",
    "Trace",
    "apply",
    "check",
    "lifetimes",
    "make_plan",
    "parse",
    "parse_plan",
    "parse_proofs",
    "predict",
    "proven_nbytes",
    "proven_us",
]
