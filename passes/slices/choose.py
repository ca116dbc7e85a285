"""Choose which chains of a step run in parts, and in how many.

peak 2916 MB at log_softmax, 206 MB each: logits, their softmax, their gradient   ->   slice 1024 rows in 8 parts: mm ...

The largest value that exists at the peak is the seed of a chain. Its number of parts is doubled as long as that lowers
the peak by a share worth having and a part has enough rows. Then the next peak is looked at, until no chain helps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir.invariants import BrokenTrace, check
from ..ir.liveness import spans
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..simulate.forecast import predict
from .chain import Facts, find_chains
from .hoist import can_hoist
from .row_rule import RowFacts, rows_of, type_shape
from .slice import Slice
from .unroll import unroll

WORTH = 0.01  # of the peak: what a slice, or twice its parts, has to save
LEAST_ROWS = 64  # of a part: matrix products of fewer rows are slower a row
MOST_PARTS = 128
CHAINS = 16
SEEDS = 4  # the largest values at a peak


@dataclass(frozen=True)
class Sliced:
    """Slices, and the trace in which they are carried out."""

    trace: Trace
    slices: tuple[Slice, ...] = ()


def choose_slices(trace: Trace, machine: Machine, facts: Facts, block: int = 1) -> Sliced:
    """Return the slices that lower the peak of a step that has no plan; none if it fits the budget.

    Args:
        facts: how ops run on rows.
        block: bytes that an allocation is rounded up to.
    """
    best, peak = Sliced(trace), predict(trace, machine).peak
    for _ in range(CHAINS):
        if peak <= machine.budget:
            break
        found = _next(best, machine, _of_unchanged(trace, best.trace, facts), block)
        if found is None:
            break
        best, peak = found, predict(found.trace, machine).peak
    return best


def _of_unchanged(trace: Trace, sliced: Trace, facts: Facts) -> Facts:
    """Return the facts of ops that are in a sliced trace as they were; its other ops run whole."""

    def found(name: str) -> RowFacts:
        old, new = trace.op.get(name), sliced.op[name]
        is_same = old is not None and (old.fn, old.reads, old.type) == (new.fn, new.reads, new.type)
        return facts(name) if is_same else RowFacts()

    return found


def _next(known: Sliced, machine: Machine, facts: Facts, block: int) -> Sliced | None:
    """Return the slices with one more; None if no chain at the peak is worth it."""
    forecast = predict(known.trace, machine)
    for seed in _seeds(known.trace, forecast.peak_index):
        chains = find_chains(known.trace, facts, seed, 2)
        ways = [_divided(known, chain, machine, block) for chain in chains if can_hoist(known.trace, chain.rule, facts)]
        peak, best = min(ways, key=lambda way: way[0], default=(forecast.peak, known))
        if peak < forecast.peak:
            return best
    return None


def _divided(known: Sliced, chain: Slice, machine: Machine, block: int) -> tuple[int, Sliced]:
    """Return the peak with a chain in as many parts as are worth having, and the slices with it."""
    peak, best = predict(known.trace, machine).peak, known
    for cut in _doubled(chain, known.trace):
        try:
            trace = unroll(known.trace, cut, block).trace
            check(trace)
        except (ValueError, BrokenTrace):
            break
        lower = predict(trace, machine).peak
        if lower > peak * (1 - WORTH):
            break
        peak, best = lower, Sliced(trace, (*known.slices, cut))
    return peak, best


def _seeds(trace: Trace, at: int) -> Iterable[str]:
    """Return the ops that make the largest values at an op, apart from inputs."""
    made = ((op, first, last) for op, _, first, last in spans(trace) if not op.is_input and len(op.makes) == 1)
    live = [op for op, first, last in made if first <= at <= last]
    return [op.name for op in sorted(live, key=lambda op: -op.nbytes)[:SEEDS]]


def _doubled(chain: Slice, trace: Trace) -> Iterable[Slice]:
    """Yield the chain in 2, 4, 8, ... parts, as long as a part is of enough rows of the products in it."""
    counts = [rows_of(type_shape(trace.op[name].type), rule.makes) for name, rule in chain.rules if rule.makes]
    parts = 2
    while parts <= min(MOST_PARTS, chain.rows) and max(counts) // parts >= min(LEAST_ROWS, max(counts) // 2):
        yield replace(chain, parts=parts)
        parts *= 2
