"""A step as text, and what to do about its bytes.  Knows no torch."""

from .choice import Choice, Proposal
from .decisions import Decision, Offload, Plan, Recompute, Reload, Stream, apply, parse_plan
from .errors import BudgetError
from .forecast import KINDS, Copy, Forecast, predict
from .invariants import BrokenTrace, check
from .lifetime import Life, lifetimes
from .machine import Machine
from .pipeline import PASSES, make_plan
from .trace import INPUTS, Op, Storage, Trace, parse

__all__ = [
    "INPUTS",
    "KINDS",
    "PASSES",
    "BrokenTrace",
    "BudgetError",
    "Choice",
    "Copy",
    "Decision",
    "Forecast",
    "Life",
    "Machine",
    "Offload",
    "Op",
    "Plan",
    "Proposal",
    "Recompute",
    "Reload",
    "Storage",
    "Stream",
    "Trace",
    "apply",
    "check",
    "lifetimes",
    "make_plan",
    "parse",
    "parse_plan",
    "predict",
]
