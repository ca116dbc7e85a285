"""Capture a call for other numbers or lengths too, if these alone differ from a call that was captured.

    x: 8 x 128, then 8 x 120         ->   dimension 1 is a symbol; each later length is made of that capture
    scale = 0.1, then scale = 0.2    ->   the float is an input of the graph

The trace decides whether they can be: at the earlier length or number it has to give the earlier graph.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from passes import Trace

from ..capture.floats.float_capture import FloatCapture
from ..capture.floats.float_inputs import FloatInputs
from ..capture.sizes.size_capture import SizeCapture
from ..capture.sizes.size_inputs import SizeInputs
from ..graph.captured import Captured
from ..graph.guard_ops import is_condition
from ..guards.assumptions import (
    ARGUMENTS,
    ATTRIBUTES,
    Assumptions,
    Facts,
    Place,
    TensorFact,
    differing_sizes,
    generalized,
    number_at,
    number_kind,
)
from ..tensors.traced_number import FloatValues
from .known_captures import KnownLength
from .lengths.general_steps import GeneralSteps
from .variants import CallFacts, Variant, assumed

KEPT = 4  # captures with symbols of one module
FAILED_KINDS = 64  # kinds of calls that are remembered because they can't be captured for others
TRIES = 2  # a first number may be special in a formula, as 1.0 is, and two lengths may take different branches
LOG = logging.getLogger(__name__)

Numbers = Mapping[Place, tuple[Any, Any]]  # the dict that has each number, and its key there


class GeneralCaptures:
    """The captures with symbols of one module's calls, and the kinds of calls that can't be captured for others."""

    def __init__(self) -> None:
        self.of_lengths: list[tuple[Assumptions, GeneralSteps]] = []  # the latest last
        self._failures: OrderedDict[Hashable, int] = OrderedDict()

    def capture_for(
        self, call: CallFacts, variants: Iterable[Variant], numbers: Numbers
    ) -> KnownLength | FloatCapture | SizeCapture | None:
        """Return a capture of a call that serves others; None if no call is known that is like it, or it was tried."""
        if (known_length := self._at_length(call, variants)) is not None:
            return known_length
        known = [(each, captured) for each in variants if (captured := each.captured) is not None]
        differing = [(each, captured, [*each.assumptions.differing(call.facts)]) for each, captured in known]
        agreeing = [each for each in differing if call.agrees(each[0].guards)]
        return self._floats(call.facts, agreeing, numbers) or self._lengths(call, agreeing)

    def _at_length(self, call: CallFacts, variants: Iterable[Variant]) -> KnownLength | None:
        """Return a capture with symbols at the lengths of a call; None if none serves it.

        The nearest length among `variants` that have a plan gives the times.
        """
        for entry in reversed(self.of_lengths):
            assumptions, general = entry
            captured, lengths = general.capture.captured, assumptions.lengths(call.facts)
            if lengths is None or not assumptions.holds(call.facts) or not call.agrees(captured.guards):
                continue
            if general.capture.trace.holds(lengths):
                self.of_lengths.remove(entry)
                self.of_lengths.append(entry)
                alike = [each for each in variants if assumed(each.guards) == assumed(captured.guards)]
                return KnownLength(general, lengths, _nearby(lengths, assumptions, alike))
        return None

    def _floats(
        self, facts: Facts, known: Iterable[tuple[Variant, Captured, list[Place]]], numbers: Numbers
    ) -> FloatCapture | None:
        """Return a capture in which those floats are inputs that alone differ from the most similar call."""
        similar = [
            (len(places), variant, captured, places) for variant, captured, places in known
            if all(_is_float(place, facts, variant.assumptions.facts) for place in places)
        ]  # fmt: skip
        if not similar:
            return None
        _, _, captured, places = min(similar, key=lambda each: each[0])
        if not places:
            return None  # a special value, which makes another graph
        places = [*dict.fromkeys((*places, *captured.float_values))]
        values = {place: value for place in places if (value := number_at(facts, place)) is not None}
        containers = {place: at for place in places if place[0] >= ATTRIBUTES and (at := numbers.get(place))}
        is_there = all(repr(at[0].get(at[1])) == repr(values[place]) for place, at in containers.items())
        is_found = all(place[0] == ARGUMENTS or place in containers for place in places)
        if self._failures.get(_kind(facts, places), 0) >= TRIES or not (is_there and is_found):
            return None
        earlier = list[tuple[Captured, FloatValues]]()
        for _, variant, captured, differing in similar:  # one of them has the branches of this call
            if {*differing, *captured.float_values} <= {*places}:
                numbers_then = {place: number_at(variant.assumptions.facts, place) for place in places}
                found = {place: value for place, value in numbers_then.items() if value is not None}
                earlier.append((captured, {**found, **captured.float_values}))
        return FloatCapture(FloatInputs(values, containers), earlier)

    def _lengths(
        self, call: CallFacts, known: Iterable[tuple[Variant, Captured, list[Place]]]
    ) -> SizeCapture | None:  # fmt: skip
        """Return a capture in which those lengths are symbols that alone differ from a call."""
        for variant, captured, places in known:
            if not places or not variant.serves_others or not _may_vary(captured):
                continue
            other = variant.assumptions.facts
            symbols = differing_sizes(call.facts, other, places)
            general = Assumptions.of(call.facts, symbols=symbols)
            lengths, earlier = general.lengths(call.facts), general.lengths(other)
            if not symbols or lengths is None or earlier is None or not general.holds(other):
                continue
            if self._failures.get((general.facts, assumed(captured.guards)), 0) >= TRIES:
                continue
            tensors = [leaf for leaf, fact in enumerate(call.facts[ARGUMENTS]) if isinstance(fact, TensorFact)]
            return SizeCapture(SizeInputs(symbols, lengths, tensors), captured, earlier)
        return None

    def note(self, call: CallFacts, capture: KnownLength | FloatCapture | SizeCapture, captured: Captured) -> bool:
        """Keep what was captured for a call, and return True; or log why its numbers or lengths are constants."""
        if isinstance(capture, KnownLength):
            return True
        if isinstance(capture, FloatCapture):
            if captured.float_values:
                return True
            if capture.is_other_branch:
                return False
            kind: Hashable = _kind(call.facts, list(capture.inputs.values))
            what, reason = "floats", capture.reason or "the value of the earlier call is special"
            count = TRIES if capture.reason else 1
        else:
            assumptions = Assumptions.of(call.facts, symbols=capture.inputs.places)
            if capture.general is not None:
                self.of_lengths.append((assumptions, GeneralSteps(capture.general)))
                del self.of_lengths[:-KEPT]
                return True
            kind, count = (assumptions.facts, assumed(capture.earlier.guards)), 1
            what, reason = "lengths", capture.reason
        self._failures[kind] = self._failures.get(kind, 0) + count
        while len(self._failures) > FAILED_KINDS:
            self._failures.popitem(last=False)
        LOG.info("%s stay constants of the graph: %s", what, reason)
        return False


def _may_vary(captured: Captured) -> bool:
    """Return True if lengths may be symbols in a capture like this: none that depends on numbers has them."""
    reads_numbers = captured.value_run_nbytes and not captured.guards
    counts = any(write.counts for write in captured.writes.items)
    depends = reads_numbers, captured.opaque, captured.float_values, counts
    return all(map(is_condition, captured.guards)) and not any(depends)


def _kind(facts: Facts, places: Iterable[Place]) -> Hashable:
    return generalized(facts, list(places), {})


def _is_float(place: Place, facts: Facts, other: Facts) -> bool:
    group, index = place
    return index >= 0 and all(number_kind(each[group][index]) is float for each in (facts, other))


def _nearby(lengths: list[int], general: Assumptions, variants: Iterable[Variant]) -> Trace | None:
    """Return the priced trace of the nearest length with a plan."""
    traces: dict[int, Trace] = {}
    for variant in variants:
        others = general.lengths(variant.assumptions.facts)
        if not variant.serves_others or others is None or not general.holds(variant.assumptions.facts):
            continue
        for step in list(variant.steps.values()):
            if step.report.plan:
                distance = sum(abs(one - other) for one, other in zip(lengths, others, strict=True))
                traces.setdefault(distance, step.report.choice.captured.trace)
    return traces[min(traces)] if traces else None
