"""A plan as text that can be saved, shown and reused.

    text = report.to_json()
    model = memgraph.compile(model, "8GB", plan=text)   ->   the same decisions, without a search
    print(memgraph.Report.from_json(text))              ->   the same report, without the model

The text is JSON, one line a decision and one an op, with a digest.  `reuse_plan` checks whether a plan fits a step.
docs/plans.md describes each field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from passes import (
    NO_PROOFS,
    BoundProofs,
    Cast,
    Link,
    Machine,
    Network,
    Plan,
    PlanResult,
    Streaming,
    Trace,
    apply,
    check,
    parse,
    parse_plan,
    parse_proofs,
    predict,
)
from passes.ir.machine import Tier
from passes.slices.slice import Slice, parse_slice

from ..errors import PlanError
from .given_reports import require_text
from .tables import mb

FORMAT = 5
LARGEST = 2.0**63  # no bytes and no times in a file are as large
REPLAN = "make a new plan, as a call without plan= does"
TYPES: dict[str, type] = {  # of fields, by annotation
    "int": int,
    "int | None": int,
    "float": float,
    "float | None": float,
    "str": str,
    "bool": bool,
}
PARTS: dict[str, type] = {"link": Link, "cast": Cast, "network": Network, "streaming": Streaming}  # of a machine


@dataclass(frozen=True)
class SavedPlan:
    """The decisions of one step; `from_json(plan.to_json()) == plan`.

    Attributes:
        step: the step as captured, with the prices of its ops.
        machine: the budget, the device and the links that it was planned for.
        torch: the version of torch that captured it.
        prices: digest of the prices of ops and links; with other prices the bounds prove nothing.
        peak: the forecast, in bytes. us: the same in microseconds.
        slices: that the step is in; `step` has them carried out.
        bound_us, any_us: proven bounds on the microseconds that a plan adds; see `passes.Proposal`.
        proofs: of the bounds, which `memgraph verify` checks.
        facts: what was measured of the step; see `report.py`.
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
    slices: tuple[Slice, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    proofs: BoundProofs = NO_PROOFS

    def __repr__(self) -> str:
        return f"<SavedPlan: {len(self.plan)} decisions at {len(self.step.ops)} ops, forecast {mb(self.peak)}>"

    @cached_property
    def bare_step(self) -> Trace:
        """The step without prices and source lines, which may differ where it is the same step."""
        return without_prices(self.step)

    @property
    def row_sizes(self) -> dict[str, int]:
        """The weights that come in blocks, with the rows of a block.

        Raises:
            PlanError: they can't be read.
        """
        try:
            return {str(row["weight"]): int(row["rows"]) for row in self.facts.get("row_blocks", ())}
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the saved plan has blocks that can't be read: {error}; {REPLAN}") from error

    def to_json(self) -> str:
        """Return the plan as JSON with a digest, so that changed text is refused."""
        facts = {
            "memgraph": FORMAT,
            "torch": self.torch,
            "machine": _facts(self.machine),
            "peak": self.peak,
            "us": self.us,
            "bound_us": self.bound_us,
            "any_us": self.any_us,
            "prices": self.prices,
            "slices": list(map(str, self.slices)),
            "facts": self.facts,
            "proofs": str(self.proofs),
            "decisions": list(map(str, self.plan)),
            "step": str(self.step).split("\n"),
        }
        return json.dumps({**facts, "digest": _seal(facts)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> SavedPlan:
        """Parse what `to_json` wrote.

        Raises:
            PlanError: the text is not a plan, is damaged, or has another format.
            TypeError: it is no text.
        """
        require_text(text)
        try:
            facts = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"the saved plan is not JSON: {error}; {REPLAN}") from error
        if not isinstance(facts, dict) or "memgraph" not in facts:
            raise PlanError(f"the JSON is no saved plan: give what Report.to_json() returned, or {REPLAN}")
        if facts["memgraph"] != FORMAT:
            raise PlanError(f"the saved plan has format {facts['memgraph']!r}, this memgraph reads {FORMAT}; {REPLAN}")
        if facts.pop("digest", None) != _seal(facts):
            raise PlanError(f"the saved plan was damaged or changed since it was written; {REPLAN}")
        try:
            plan, step = parse_plan("\n".join(facts["decisions"])), parse("\n".join(facts["step"]))
            slices = tuple(map(parse_slice, facts["slices"]))
            names = ("torch", "prices", "peak", "us", "bound_us", "any_us")
            proven = typed(cls, facts, names)
            known, proofs = dict(facts["facts"]), parse_proofs(facts["proofs"])
            return cls(plan, step, _machine(facts["machine"]), **proven, slices=slices, facts=known, proofs=proofs)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the saved plan can't be read: {error}; {REPLAN}") from error


PlanRecord = SavedPlan | str | PathLike[str]


def torch_version() -> str:
    """Return the version of torch, which is not imported for plans that are only read."""
    import torch

    return str(torch.__version__)


def record_plan(
    choice: PlanResult, machine: Machine, slices: tuple[Slice, ...] = (), facts: dict[str, Any] | None = None
) -> SavedPlan:
    """Return the plan in the form that is saved."""
    trace, forecast = choice.captured.trace, choice.forecast
    version, prices = torch_version(), with_saved_prices(trace, machine)
    proven, known = (choice.bound_us, choice.any_us), _with_capped_tier(trace, machine)
    forecasts = forecast.peak, forecast.us
    return SavedPlan(
        choice.plan, trace, known, version, prices, *forecasts, *proven, slices, facts or {}, choice.proofs
    )


def saved_plan(given: PlanRecord) -> SavedPlan:
    """Read a plan from JSON text or the path of a file; a `SavedPlan` is returned as it is.

    Raises:
        PlanError: the file can't be read, or is not a plan.
        TypeError: it is neither a text nor a path.
    """
    if isinstance(given, SavedPlan):
        return given
    if not isinstance(given, PathLike):
        require_text(given)
    if isinstance(given, str) and not given.strip():
        raise PlanError(f"plan is an empty text: give a saved plan, its JSON text or the path of its file, or {REPLAN}")
    if isinstance(given, str) and given.lstrip().startswith(("{", "[")):
        return SavedPlan.from_json(given)
    try:
        text = Path(given).read_text()
    except (OSError, ValueError) as error:
        raise PlanError(f"no saved plan can be read from {str(given)[:200]!r}: {error.args[-1]}; {REPLAN}") from error
    return SavedPlan.from_json(text)


def carried_out(saved: SavedPlan) -> PlanResult:
    """Return the forecasts of a plan's own step, without its decisions and with them.

    Raises:
        BrokenTrace, KeyError, ValueError: the plan can't be carried out on its step.
    """
    applied = apply(saved.step, saved.plan)
    check(applied)
    forecasts = predict(saved.step, saved.machine), predict(applied, saved.machine)
    return PlanResult(saved.plan, *forecasts, saved.bound_us, saved.any_us, proofs=saved.proofs)


def without_prices(trace: Trace) -> Trace:
    """Drop microseconds, workspaces and source lines, which may differ between runs of the same step."""
    return replace(trace, ops=tuple(replace(op, us=0.0, workspace=0, where="") for op in trace.ops))


def with_saved_prices(trace: Trace, machine: Machine) -> str:
    """Return a digest of everything that a bound depends on, except the budget."""
    return _digest(f"{trace}{replace(_with_capped_tier(trace, machine), budget=0)!r}")


def _with_capped_tier(trace: Trace, machine: Machine) -> Machine:
    """Cap the free bytes of the tiers at the bytes of the step: more of them change no plan."""
    most = sum(trace.nbytes.values())

    def capped(link: Link) -> Link:
        return replace(link, capacity=min(link.capacity, most))

    behind = tuple(replace(tier, link=capped(tier.link)) for tier in machine.behind)
    return replace(machine, link=capped(machine.link), behind=behind)


def typed(kind: type, facts: dict[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """Check that facts have the types of a dataclass's fields.

    Raises:
        TypeError: a fact has another type than its field, or is not finite or larger than any number of bytes.
        KeyError: one of `names` is missing.
    """
    types = {field.name: TYPES[str(field.type)] for field in fields(kind) if str(field.type) in TYPES}
    found = facts if names is None else {name: facts[name] for name in names}
    for name, fact in found.items():
        wanted = types.get(name, ())
        is_number = isinstance(fact, int | float) and not isinstance(fact, bool)
        is_finite = is_number and abs(fact) < LARGEST
        if not (is_finite if wanted is float else type(fact) is wanted and (is_finite or wanted is not int)):
            raise TypeError(f"{name} is {fact!r:.60}")
    return found


def _facts(machine: Machine) -> dict[str, object]:
    """Return the fields of the machine, without the parts that it does not have."""
    parts = {**{name: asdict(kind()) for name, kind in PARTS.items()}, "behind": ()}
    return {name: fact for name, fact in asdict(machine).items() if name not in parts or fact != parts[name]}


def _machine(facts: dict[str, Any]) -> Machine:
    """Return the machine that `_facts` printed.

    Raises:
        TypeError: a fact is of another type than its field.
    """
    parts = {name: kind(**typed(kind, facts[name])) for name, kind in PARTS.items() if name in facts}
    behind = tuple(Tier(str(each["name"]), Link(**typed(Link, each["link"]))) for each in facts.get("behind", ()))
    fields = {name: fact for name, fact in facts.items() if name not in (*PARTS, "behind")}
    return Machine(**typed(Machine, fields), behind=behind, **parts)


def _seal(facts: dict[str, object]) -> str:
    return _digest(json.dumps(facts, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
