"""Choose which chains of a step run in parts, and in how many.

peak 2916 MB at log_softmax, 206 MB each: logits, their softmax, their gradient   ->   slice 1024 rows in 8 parts: mm ...

The largest value that exists at the peak is the seed of a chain. Its number of parts is doubled as long as that lowers
the peak by a share worth having and a part has enough rows. Then the next peak is looked at, until no chain helps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir.invariants import BrokenTrace, check
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..simulate.forecast import predict
from .chain import Facts, find_chain
from .hoist import can_hoist
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
        found = _next(best, machine, facts, block)
        if found is None:
            break
        best, peak = found, predict(found.trace, machine).peak
    return best


def _next(known: Sliced, machine: Machine, facts: Facts, block: int) -> Sliced | None:
    """Return the slices with one more; None if no chain at the peak is worth it."""
    forecast = predict(known.trace, machine)
    for seed in _seeds(known.trace, forecast.peak_index):
        chain = find_chain(known.trace, facts, seed, 2)
        if chain is None or not can_hoist(known.trace, chain.rule, facts):
            continue
        best, peak = None, forecast.peak
        for cut in _doubled(chain):
            try:
                trace = unroll(known.trace, cut, block).trace
                check(trace)
            except (ValueError, BrokenTrace):
                break
            lower = predict(trace, machine).peak
            if lower > peak * (1 - WORTH):
                break
            best, peak = Sliced(trace, (*known.slices, cut)), lower
        if best is not None:
            return best
    return None


def _seeds(trace: Trace, at: int) -> Iterable[str]:
    """Return the ops that make the largest values at an op, apart from inputs."""
    live = predict_live(trace, at)
    return [name for name, _ in sorted(live.items(), key=lambda pair: -pair[1])[:SEEDS]]


def predict_live(trace: Trace, at: int) -> dict[str, int]:
    """Map the ops that make what is live at an op to the bytes; a view's source stands for it."""
    from ..ir.liveness import spans

    return {
        op.name: made.nbytes
        for op, made, first, last in spans(trace)
        if first <= at <= last and not op.is_input and len(op.makes) == 1
    }


def _doubled(chain: Slice) -> Iterable[Slice]:
    """Yield the chain in 2, 4, 8, ... parts."""
    parts = 2
    while parts <= min(MOST_PARTS, chain.rows) and chain.rows // parts >= min(LEAST_ROWS, chain.rows // 2):
        yield replace(chain, parts=parts)
        parts *= 2
