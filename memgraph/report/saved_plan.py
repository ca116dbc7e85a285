"""A plan to keep: what was decided of which step, for which budget.

    text = report.to_json()
    model = memgraph.compile(model, "8GB", plan=text)   ->   the same decisions, without a search

The text is JSON, one line a decision and one an op, with a digest.  `reuse` says for which steps a plan is good.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from passes import Cast, Link, Machine, Network, Plan, PlanResult, Streaming, Trace, parse, parse_plan

from ..errors import PlanError

FORMAT = 3
ANEW = "plan anew, without plan="
TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
PARTS: dict[str, type] = {"link": Link, "cast": Cast, "network": Network, "streaming": Streaming}  # of a machine


@dataclass(frozen=True)
class SavedPlan:
    """The decisions of one step; `from_json(plan.to_json()) == plan`.

    Attributes:
        step: the step as captured, without prices and source lines.
        machine: the budget, the device and the links that it was planned for.
        torch: the version of torch that captured it.
        prices: a digest of what was believed of ops and links; with other prices its bounds prove nothing.
        peak: the forecast, in bytes. us: the same in microseconds.
        bound_us, any_us: what every plan adds, in microseconds; see `passes.Proposal`.
    """

    plan: Plan
    step: Trace
    machine: Machine
    torch: str
    prices: str
    peak: int
    us: float
    bound_us: float = 0.0
    any_us: float = 0.0

    def to_json(self) -> str:
        """All of it, with a digest: a text that was changed is refused."""
        facts = {
            "memgraph": FORMAT,
            "torch": self.torch,
            "machine": _facts(self.machine),
            "peak": self.peak,
            "us": self.us,
            "bound_us": self.bound_us,
            "any_us": self.any_us,
            "prices": self.prices,
            "decisions": list(map(str, self.plan)),
            "step": str(self.step).split("\n"),
        }
        return json.dumps({**facts, "digest": _seal(facts)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> SavedPlan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: the text is no plan, is damaged, or was written by another memgraph.
        """
        try:
            facts = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"the saved plan is not JSON: {error}; {ANEW}") from error
        if not isinstance(facts, dict) or "memgraph" not in facts:
            raise PlanError(f"the JSON is no saved plan: give what Report.to_json() returned, or {ANEW}")
        if facts["memgraph"] != FORMAT:
            raise PlanError(f"the saved plan has format {facts['memgraph']!r}, this memgraph reads {FORMAT}; {ANEW}")
        if facts.pop("digest", None) != _seal(facts):
            raise PlanError(f"the saved plan was damaged or changed since it was written; {ANEW}")
        try:
            plan, step = parse_plan("\n".join(facts["decisions"])), parse("\n".join(facts["step"]))
            names = ("torch", "prices", "peak", "us", "bound_us", "any_us")
            return cls(plan, step, _machine(facts["machine"]), **_typed(cls, facts, names))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the saved plan can't be read: {error}; {ANEW}") from error


PlanRecord = SavedPlan | str | PathLike[str]


def record_plan(choice: PlanResult, machine: Machine) -> SavedPlan:
    """What there is to keep of a plan."""
    trace, forecast = choice.captured.trace, choice.forecast
    version, prices = str(torch.__version__), with_saved_prices(trace, machine)
    proven, known = (choice.bound_us, choice.any_us), _roomed(trace, machine)
    return SavedPlan(choice.plan, without_prices(trace), known, version, prices, forecast.peak, forecast.us, *proven)


def saved_plan(given: PlanRecord) -> SavedPlan:
    """The plan that is meant: as it is, as its JSON text, or as the path of a file.

    Raises:
        PlanError: there is no such file, or no plan in it.
    """
    if isinstance(given, SavedPlan):
        return given
    if isinstance(given, str) and not given.strip():
        raise PlanError(f"plan is an empty text: give a saved plan, its JSON text or the path of its file, or {ANEW}")
    if isinstance(given, str) and given.lstrip().startswith(("{", "[")):
        return SavedPlan.from_json(given)
    try:
        text = Path(given).read_text()
    except (OSError, ValueError) as error:
        raise PlanError(f"no saved plan can be read from {str(given)[:200]!r}: {error.args[-1]}; {ANEW}") from error
    return SavedPlan.from_json(text)


def without_prices(trace: Trace) -> Trace:
    """What a step is, and not how fast it runs or where it is written: no microseconds, workspace, source lines."""
    return replace(trace, ops=tuple(replace(op, us=0.0, workspace=0, where="") for op in trace.ops))


def with_saved_prices(trace: Trace, machine: Machine) -> str:
    """A digest of all that a bound was proven of, but for the budget."""
    return _digest(f"{trace}{replace(_roomed(trace, machine), budget=0)!r}")


def _roomed(trace: Trace, machine: Machine) -> Machine:
    """Without the room on the far tier for more than there is: how much of it is free just then changes no plan."""
    return replace(machine, link=replace(machine.link, capacity=min(machine.link.capacity, sum(trace.nbytes.values()))))


def _typed(kind: type, facts: dict[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """The facts of these names, or all, for the fields of a dataclass.

    Raises:
        TypeError: one is of another type than its field, or a number that JSON has no sign for.
        KeyError: one of the names is missing.
    """
    types = {field.name: TYPES[str(field.type)] for field in fields(kind) if str(field.type) in TYPES}
    found = facts if names is None else {name: facts[name] for name in names}
    for name, fact in found.items():
        wanted = types.get(name, ())
        is_number = isinstance(fact, int | float) and not isinstance(fact, bool)
        well = is_number and math.isfinite(fact) if wanted is float else type(fact) is wanted
        if not well:
            raise TypeError(f"{name} is {fact!r}")
    return found


def _facts(machine: Machine) -> dict[str, object]:
    """Return the fields of the machine, without the parts that it does not have."""
    return {name: fact for name, fact in asdict(machine).items() if name not in PARTS or fact != asdict(PARTS[name]())}


def _machine(facts: dict[str, Any]) -> Machine:
    """Return the machine that `_facts` printed.

    Raises:
        TypeError: a fact is of another type than its field.
    """
    parts = {name: kind(**_typed(kind, facts[name])) for name, kind in PARTS.items() if name in facts}
    return Machine(**_typed(Machine, {name: fact for name, fact in facts.items() if name not in PARTS}), **parts)


def _seal(facts: dict[str, object]) -> str:
    return _digest(json.dumps(facts, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
