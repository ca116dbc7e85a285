"""Make one plan in its own process, without torch, so that its peak memory is the planner's.

    python -m benchmarks.one_plan FILE SHARE LINK    # bytes per microsecond each way, 0 for no link

A share is of the step's peak above its inputs without a plan. Prints one line of JSON.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from passes import BudgetError, Forecast, Link, Machine, PlanResult, Trace, make_plan, parse, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.lp.model import PlanModel
from passes.lp.problem import PlanProblem
from passes.lp.relax import relax


@dataclass(frozen=True)
class Found:
    """The result for a budget, in percent of the step without a plan.

    `outcome` is "fits", or "floor" (what must be in use at once is more), "proven" (the linear program of all plans has
    no point), "single" (that of the plans that run each value again at most once has none), "none" (nothing is proven).
    `least` is, of "floor", what no plan can be below, and else the least peak that was found.
    """

    outcome: str
    overhead: float | None = None
    bound: float | None = None
    gap: float | None = None
    single: bool | None = None  # whether no value runs again twice or early
    decisions: dict[str, int] | None = None
    least: int | None = None


def main(file: str, share: str, link: str) -> None:
    trace = parse(Path(file).read_text())
    inputs = sum(op.nbytes for op in trace.ops if op.is_input)
    plain = predict(trace, Machine(1 << 62))
    above = int(float(share) * (plain.peak - inputs))
    machine = Machine(inputs + above, "cuda", "host", link=Link(float(link), float(link)))
    begin = time.perf_counter()
    answer = _plan(trace, machine)
    spent = _spent(begin)
    found = _fits(answer) if isinstance(answer, PlanResult) else _fails(answer, trace, machine, inputs)
    print(json.dumps(_facts(trace, plain, inputs) | {"budget": above, **spent, **asdict(found)}))


def _facts(trace: Trace, plain: Forecast, inputs: int) -> dict[str, float]:
    """Describe the step without a plan; bytes are above its inputs."""
    return {"nodes": len(trace.ops), "keep_ms": plain.us / 1e3, "keep_bytes": plain.peak - inputs}


def _spent(begin: float) -> dict[str, float]:
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": time.perf_counter() - begin, "rss": rss}


def _plan(trace: Trace, machine: Machine) -> PlanResult | BudgetError:
    try:
        return make_plan(trace, machine)
    except BudgetError as error:
        return error


def _fits(choice: PlanResult) -> Found:
    return Found(
        "fits",
        overhead=100 * choice.overhead,
        bound=100 * (choice.lower_bound / choice.captured.us - 1),
        gap=100 * choice.gap,
        single=choice.is_single,
        decisions=dict(Counter(type(decision).__name__ for decision in choice.plan)),
    )


def _fails(error: BudgetError, trace: Trace, machine: Machine, inputs: int) -> Found:
    floor = re.search(r"No plan can use less than (\d+) bytes", str(error))
    least = int(floor[1]) if floor else error.smallest
    return Found("floor" if floor else _proven(trace, machine), least=least - inputs)


def _proven(trace: Trace, machine: Machine) -> str:
    """Return the proof of the linear program that no plan fits a budget; the planner's error does not have it."""
    relaxed = relax(PlanModel(PlanProblem(ReuseGaps(trace), machine), machine.budget))
    if relaxed is None:
        return "proven"
    return "single" if relaxed.solution is None else "none"


if __name__ == "__main__":
    main(*sys.argv[1:])
