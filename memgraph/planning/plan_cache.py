"""A cache of plans, in memory and on disk.

    remember(trace, machine, options, result)    keeps the plan of a search
    cached_plan(trace, machine, options)         returns it in milliseconds, also in a later process

The key is a digest of the step's ops and bytes, the machine, the options, and the versions of torch and of the passes.
A plan is used while prices are as they were.  A step of the same ops in other shapes tries the plans of its neighbours:
one that fits is taken if it is near the bound proven for a neighbour that needs less.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import passes
from passes import NO_PROOFS, Machine, Plan, PlanResult, Trace, parse_plan, parse_proofs, predict
from passes.ir.machine import Tier
from passes.order.microbatch_order import order_like
from passes.pipeline import FAIR_GAP
from passes.simulate.plan_result import try_plan

from ..errors import PlanError
from ..report.reuse_plan import reuse_plan
from ..report.saved_plan import SavedPlan, with_saved_prices, without_prices
from ..system.measurement_cache import evict_oldest, read_cached, write_cached

MEMORY_NBYTES = 16 << 20  # of plans that a process keeps
DISK_NBYTES = 64 << 20  # of plans on disk
NEIGHBOURS = 64  # shapes of one kind of step whose plans are kept for other shapes
TRIED = 2  # neighbours that are tried for one step
FILE = "plans.sqlite"


@dataclass(frozen=True)
class NeighbourPlan:
    """The plan of another shape.

    Attributes:
        peak: bytes of that step without a plan.
        bound: the share of its time that every plan adds at least.
    """

    peak: int
    bound: float
    plan: Plan


_texts: OrderedDict[str, str] = OrderedDict()
_near: OrderedDict[str, OrderedDict[int, NeighbourPlan]] = OrderedDict()


def cached_plan(trace: Trace, machine: Machine, options: Hashable) -> PlanResult | None:
    """Return the cached plan of this step, or that of a neighbour, if there is one and the step needs a plan."""
    captured = predict(trace, machine)
    if captured.peak <= machine.budget:
        return None
    key, kind = step_key(trace, machine, options), _kind(trace, machine, options)
    return _cached(key, trace, machine) or _neighbours(kind, trace, machine, captured.peak)


def remember(trace: Trace, machine: Machine, options: Hashable, choice: PlanResult, final: bool = False) -> None:
    """Keep the plan of this step.  A `final` plan was chosen with times measured inside the step; its bounds are for
    those times, and are not kept."""
    captured = choice.captured
    if not choice.plan:
        return
    ordered = order_like(trace, captured.trace)
    facts = {
        "decisions": list(map(str, choice.plan)),
        "order": None if ordered == trace else [(op.name, op.section) for op in ordered.ops],
        "bound_us": 0.0 if final else choice.bound_us,
        "any_us": 0.0 if final else choice.any_us,
        "proofs": str(NO_PROOFS if final else choice.proofs),
        "prices": with_saved_prices(ordered, machine),
        "final": final or is_final(trace, machine, options),
    }
    put_facts(step_key(trace, machine, options), json.dumps(facts))
    bound = replace(choice, others=None).lower_bound / captured.us - 1 if captured.us else 0.0
    shapes = _near.setdefault(_kind(trace, machine, options), OrderedDict())
    shapes[captured.peak] = NeighbourPlan(captured.peak, bound, choice.plan)
    _shorten(shapes, NEIGHBOURS)
    _shorten(_near, NEIGHBOURS)


def is_final(trace: Trace, machine: Machine, options: Hashable) -> bool:
    """Return True if the plan kept for this step was chosen with times measured inside the step."""
    facts = get_facts(step_key(trace, machine, options))
    return bool(facts and facts.get("final"))


def _cached(key: str, trace: Trace, machine: Machine) -> PlanResult | None:
    """Return the cached plan, if prices of ops and links are unchanged."""
    facts = get_facts(key)
    if facts is None:
        return None
    try:
        order = _reordered(trace, facts["order"])
        if facts["prices"] != with_saved_prices(order, machine):
            return None
        plan = parse_plan("\n".join(facts["decisions"]))
        proven = facts["prices"], 0, 0.0, facts["bound_us"], facts["any_us"]
        proofs = parse_proofs(facts["proofs"])
        known = SavedPlan(plan, without_prices(order), machine, str(torch.__version__), *proven, proofs=proofs)
        return reuse_plan([known], order, machine)
    except (PlanError, LookupError, TypeError, ValueError):  # a cache on disk may hold anything
        return None


def _reordered(trace: Trace, places: list[tuple[str, int]] | None) -> Trace:
    """Return the step with its ops in this order, each with its section; as it is for None."""
    if places is None:
        return trace
    return replace(trace, ops=tuple(replace(trace.op[name], section=section) for name, section in places))


def _neighbours(kind: str, trace: Trace, machine: Machine, captured_peak: int) -> PlanResult | None:
    """Return a neighbour's plan that fits and is near the bound.

    The more a step needs beyond the budget, the more time a plan adds.  So the bound of the largest neighbour that
    needs less is about the least for this step, though it is not proven for it.
    """
    neighbours = list(_near[kind].values()) if kind in _near else []
    least = max((near.bound for near in neighbours if near.peak <= captured_peak), default=0.0)
    larger = sorted((near for near in neighbours if near.peak >= captured_peak), key=lambda near: near.peak)
    for near in larger[:TRIED]:
        choice = try_plan(near.plan, trace, machine)
        if choice and choice.forecast.peak <= machine.budget and choice.overhead <= least + FAIR_GAP:
            return choice
    return None


def step_key(trace: Trace, machine: Machine, options: Hashable) -> str:
    """Return a key of a step's ops and bytes, the machine, and the options."""
    return _digest(f"{without_prices(trace)}\n{_settings(machine, options)}")


def _kind(trace: Trace, machine: Machine, options: Hashable) -> str:
    """Return a key that is the same for every shape."""
    ops = "\n".join(f"{op.name} {op.fn} {op.reads} {op.phase}" for op in trace.ops)
    return _digest(f"{ops}\n{_settings(machine, options)}")


def _settings(machine: Machine, options: Hashable) -> str:
    # The bytes that are free differ from process to process; the options have those that a caller gives.
    nominal = machine.nominal
    link = replace(nominal.link, capacity=min(nominal.link.capacity, 1))
    behind = tuple(Tier(tier.name, replace(tier.link, capacity=min(tier.link.capacity, 1))) for tier in nominal.behind)
    return f"{replace(nominal, link=link, behind=behind)!r} {options!r} {torch.__version__} {_passes()}"


@cache
def _passes() -> str:
    """Return a digest of the passes' files: another build may find other plans, or read them differently."""
    folder = Path(passes.__file__).parent
    return _digest("".join(path.read_text() for path in sorted(folder.rglob("*.py"))))


def get_facts(key: str) -> Any:
    """Return what is kept under a key; None if there is nothing."""
    if key in _texts:
        _texts.move_to_end(key)
        return json.loads(_texts[key])
    facts = read_cached(key, FILE)
    return facts if isinstance(facts, dict) else None


def put_facts(key: str, text: str) -> None:
    """Keep a JSON text of facts."""
    if _texts.get(key) == text:
        return
    _texts.pop(key, None)
    _texts[key] = text
    while sum(map(len, _texts.values())) > MEMORY_NBYTES:
        _texts.popitem(last=False)
    write_cached(key, json.loads(text), FILE)
    evict_oldest(FILE, DISK_NBYTES)


def _shorten(entries: OrderedDict[Any, Any], most: int) -> None:
    while len(entries) > most:
        entries.popitem(last=False)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
