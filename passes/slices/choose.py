"""Choose which chains of a step run in parts, and in how many.

logits, their softmax and its gradient of 206 MB each at the peak   ->   slice 1024 rows in 16 parts: mm ...

The largest value that exists at the peak is the seed of a chain. Its number of parts is doubled as long as that lowers
the peak by a share worth having and a part has enough rows. Then the next peak is looked at, until no chain helps.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from ..ir.invariants import BrokenTrace, check
from ..ir.liveness import spans
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..simulate.forecast import predict
from .blocks import returned_values
from .chain import Facts, find_chains
from .row_rule import RowFacts, rows_of, type_shape
from .slice import Slice
from .unroll import unroll

WORTH = 0.01  # of the peak: what a slice, or twice its parts, has to save
LEAST_ROWS = 64  # of a part: matrix products of fewer rows are slower a row
MOST_PARTS = 128
CHAINS = 8  # of different forms
SEEDS = 4  # the largest values at a peak


@dataclass(frozen=True)
class Sliced:
    """Slices, and the trace in which they are carried out."""

    trace: Trace
    slices: tuple[Slice, ...] = ()


def choose_slices(trace: Trace, machine: Machine, facts: Facts, unit: int = 1, reruns: bool = False) -> Sliced:
    """Return the slices that lower the peak of a step that has no plan; none if it fits the budget.

    Args:
        facts: how ops run on rows.
        unit: bytes that an allocation is rounded up to.
        reruns: whether chains may be taken that run forward ops again in backward.
    """
    best, peak = Sliced(trace), predict(trace, machine).peak
    for _ in range(CHAINS):
        if peak <= machine.budget:
            break
        found = _next(best, machine, of_captured(facts, trace, best.trace), unit, reruns)
        if found is None:
            break
        best, peak = found, predict(found.trace, machine).peak
    return best


def slice_around(trace: Trace, machine: Machine, facts: Facts, seed: str, parts: int, unit: int = 1) -> Slice | None:
    """Return the chain around the result of an op with which the step has the lowest peak; None if there is none.

    Of equal peaks the chain counts that leaves the fewest bytes whole.
    """
    found: list[tuple[int, int, Slice]] = []
    for chain in find_chains(trace, facts, seed, parts):
        sliced = _carried_out(trace, chain, unit)
        if sliced is not None:
            kept = returned_values(trace, chain.rule)
            saved = sum(trace.op[name].nbytes for name in chain.rule if name not in kept)
            found.append((predict(sliced, machine).peak, -saved, chain))
    return min(found, key=lambda each: each[:2])[2] if found else None


def of_captured(facts: Facts, captured: Trace, trace: Trace) -> Facts:
    """Return the facts of the ops that are as captured: slices give names of captured ops to others."""

    def known(name: str) -> RowFacts:
        old, new = captured.op.get(name), trace.op[name]
        is_same = old is not None and (old.fn, old.reads, old.type) == (new.fn, new.reads, new.type)
        return facts(name) if is_same else RowFacts()

    return known


def _next(known: Sliced, machine: Machine, facts: Facts, unit: int, reruns: bool) -> Sliced | None:
    """Return the slices with one more; None if no chain at the peak is worth it."""
    forecast = predict(known.trace, machine)
    for seed in _seeds(known.trace, forecast.peak_index):
        chains = find_chains(known.trace, facts, seed, 2)
        ways = [_divided(known, chain, machine, unit) for chain in chains if reruns or not chain.reruns]
        peak, best = min(ways, key=lambda way: way[0], default=(forecast.peak, known))
        if peak < forecast.peak:
            return _alike(known, best, machine, seed, facts, unit)
    return None


def _alike(known: Sliced, best: Sliced, machine: Machine, seed: str, facts: Facts, unit: int) -> Sliced:
    """Return the slices with those of layers that are alike, which are cut alike unless that raises the peak."""
    before, chosen = known.trace.op, best.slices[-1]
    form = [(before[name].fn, rule) for name, rule in chosen.rules]
    others = [op.name for op in known.trace.ops if (op.fn, op.type) == (before[seed].fn, before[seed].type)]
    for other in others:
        if other in chosen.rule or other not in best.trace.op:
            continue
        for chain in find_chains(best.trace, of_captured(facts, known.trace, best.trace), other, chosen.parts):
            if (chain.reruns, [(best.trace.op[name].fn, rule) for name, rule in chain.rules]) == (chosen.reruns, form):
                trace = _carried_out(best.trace, chain, unit)
                if trace is not None and predict(trace, machine).peak <= predict(best.trace, machine).peak:
                    best = Sliced(trace, (*best.slices, chain))
                    break
    return best


def _divided(known: Sliced, chain: Slice, machine: Machine, unit: int) -> tuple[int, Sliced]:
    """Return the peak with a chain in as many parts as are worth having, and the slices with it."""
    peak, best = predict(known.trace, machine).peak, known
    for cut in _doubled(chain, known.trace):
        trace = _carried_out(known.trace, cut, unit)
        if trace is None or (lower := predict(trace, machine).peak) > peak * (1 - WORTH):
            break
        peak, best = lower, Sliced(trace, (*known.slices, cut))
    return peak, best


def _carried_out(trace: Trace, cut: Slice, unit: int) -> Trace | None:
    """Return the trace in a slice; None if it can't run there."""
    with suppress(ValueError, BrokenTrace):
        sliced = unroll(trace, cut, unit).trace
        check(sliced)
        return sliced
    return None


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
