"""Plans that were searched for, kept for the calls that come again: found, applied and forecast anew, not searched.

    choice = planned(trace, machine, options, search)    searches
    choice = planned(trace, machine, options, search)    the same plan, in milliseconds, also in a later process

A plan is kept under a digest of the step's ops and bytes, the machine, the options, the versions of torch and of the
passes, and is used again while prices are what they were.  A step of the same ops with other shapes is tried with the
plans of its neighbours: one that fits is taken if it is near what was proven of a neighbour that needs less.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import passes
from passes import Machine, Plan, PlanResult, Trace, apply, check, parse_plan, predict
from passes.ir.machine import rates, with_rates
from passes.order.microbatch_order import reslice_microbatches, slice_microbatches
from passes.pipeline import FAIR_GAP

from ..errors import PlanError
from ..report.reuse_plan import reuse_plan
from ..report.saved_plan import SavedPlan, with_saved_prices, without_prices
from ..system.measurement_cache import evict_oldest, read_cached, write_cached

MEMORY_NBYTES = 16 << 20  # of the plans' texts that a process keeps
DISK_NBYTES = 64 << 20  # of those that later processes find
NEIGHBOURS = 64  # shapes of one kind of step whose plans are tried for another
TRIED = 2  # of them
FILE = "plans.sqlite"

Search = Callable[[Trace, Machine], PlanResult]


@dataclass(frozen=True)
class NeighbourPlan:
    """A plan that was found for another shape: what that step needs as it is, and what was proven to be added to it, as
    a share of its time."""

    peak: int
    bound: float
    plan: Plan


_texts: OrderedDict[str, str] = OrderedDict()
_near: OrderedDict[str, OrderedDict[int, NeighbourPlan]] = OrderedDict()


def find_plan(trace: Trace, machine: Machine, options: Hashable, search: Search) -> PlanResult:
    """The plan that was found for this step before, or one of a neighbour's, or else what `search` finds.

    Raises:
        BudgetError: it finds nothing that fits.
    """
    captured = predict(trace, machine)
    if captured.peak <= machine.budget:
        return search(trace, machine)
    key, kind = _key(trace, machine, options), _kind(trace, machine, options)
    choice = _returned(key, trace, machine) or _neighbours(kind, trace, machine, captured)
    if choice is None:
        choice = search(trace, machine)
    remember(trace, machine, options, choice)
    return choice


def remember(trace: Trace, machine: Machine, options: Hashable, choice: PlanResult, settled: bool = False) -> None:
    """Keep the plan for this step.  `settled`: it was chosen with the times of the step itself, so that what is proven
    of it is of those."""
    captured = choice.captured
    if not choice.plan:
        return
    ordered = reslice_microbatches(trace, captured.trace)
    facts = {
        "decisions": list(map(str, choice.plan)),
        "sliced": [op.name for op in ordered.ops] != [op.name for op in trace.ops],
        "bound_us": 0.0 if settled else choice.bound_us,
        "any_us": 0.0 if settled else choice.any_us,
        "prices": with_saved_prices(ordered, machine),
        "settled": settled or is_final(trace, machine, options),
    }
    _put(_key(trace, machine, options), json.dumps(facts))
    bound = choice.lower_bound / captured.us - 1 if captured.us else 0.0
    shapes = _near.setdefault(_kind(trace, machine, options), OrderedDict())
    shapes[captured.peak] = NeighbourPlan(captured.peak, bound, choice.plan)
    _shorten(shapes, NEIGHBOURS)
    _shorten(_near, NEIGHBOURS)


def is_final(trace: Trace, machine: Machine, options: Hashable) -> bool:
    """Whether the plan that is kept for this step was looked for with the times of the step itself."""
    facts = _get(_key(trace, machine, options))
    return bool(facts and facts.get("settled"))


def _returned(key: str, trace: Trace, machine: Machine) -> PlanResult | None:
    """The plan that is kept, if ops and links still take what they did."""
    facts = _get(key)
    if facts is None:
        return None
    try:
        order = slice_microbatches(trace, machine) if facts["sliced"] else trace
        if facts["prices"] != with_saved_prices(order, machine):
            return None
        plan = parse_plan("\n".join(facts["decisions"]))
        proven = facts["prices"], 0, 0.0, facts["bound_us"], facts["any_us"]
        known = SavedPlan(plan, without_prices(order), machine, str(torch.__version__), *proven)
        return reuse_plan([known], order, machine)
    except (PlanError, KeyError, TypeError, ValueError):  # what is kept is not to be trusted more than a file
        return None


def _neighbours(kind: str, trace: Trace, machine: Machine, captured: passes.Forecast) -> PlanResult | None:
    """A neighbour's plan that fits, and is near what has to be added.

    The more a step needs beyond the budget, the more a plan has to add: so what is proven of the largest neighbour that
    needs less is about the least here, though nobody has proven it of this step.
    """
    known = list(_near[kind].values()) if kind in _near else []
    least = max((near.bound for near in known if near.peak <= captured.peak), default=0.0)
    larger = sorted((near for near in known if near.peak >= captured.peak), key=lambda near: near.peak)
    for near in larger[:TRIED]:
        try:
            applied = apply(trace, near.plan)
            check(applied)
        except (ValueError, KeyError, passes.BrokenTrace):
            continue
        choice = PlanResult(near.plan, captured, predict(applied, machine))
        if choice.forecast.peak <= machine.budget and choice.overhead <= least + FAIR_GAP:
            return choice
    return None


def _key(trace: Trace, machine: Machine, options: Hashable) -> str:
    return _digest(f"{without_prices(trace)}\n{_settings(machine, options)}")


def _kind(trace: Trace, machine: Machine, options: Hashable) -> str:
    """The same for every shape."""
    ops = "\n".join(f"{op.name} {op.fn} {op.reads} {op.phase}" for op in trace.ops)
    return _digest(f"{ops}\n{_settings(machine, options)}")


def _settings(machine: Machine, options: Hashable) -> str:
    with_units = with_rates(machine, [float(bool(rate)) for rate in rates(machine)])
    with_units = replace(with_units, link=replace(with_units.link, capacity=min(machine.link.capacity, 1)))
    return f"{with_units!r} {options!r} {torch.__version__} {_passes()}"


@cache
def _passes() -> str:
    """A digest of the passes' files: another build may find other plans, or mean something else by them."""
    folder = Path(passes.__file__).parent
    return _digest("".join(path.read_text() for path in sorted(folder.rglob("*.py"))))


def _get(key: str) -> Any:
    if key in _texts:
        _texts.move_to_end(key)
        return json.loads(_texts[key])
    facts = read_cached(key, FILE)
    return facts if isinstance(facts, dict) else None


def _put(key: str, text: str) -> None:
    if _texts.get(key) == text:
        return
    _texts.pop(key, None)
    _texts[key] = text
    while sum(map(len, _texts.values())) > MEMORY_NBYTES:
        _texts.popitem(last=False)
    write_cached(key, json.loads(text), FILE)
    evict_oldest(FILE, DISK_NBYTES)


def _shorten(known: OrderedDict[Any, Any], most: int) -> None:
    while len(known) > most:
        known.popitem(last=False)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
