"""The captures of one module's calls, each with what it assumes and the steps that were planned of it.

    a call   ->   the first variant whose assumptions hold, the latest used first
    its values are others than assumed   ->   the next one that agrees with what was found

Steps are dropped before captures, and these before the values that they assumed, which count for a warning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from ..capture.sizes.later_graph import LaterGraph
from ..graph.captured import Captured
from ..graph.guard_ops import GuardFailed, Scalars, ValueGuard, same_values
from ..guards.assumptions import Assumptions, Facts, number_at
from ..guards.module_attributes import AttributeWalk
from ..runtime.step import Step
from ..tensors.loss_outputs import OutputSelector
from .known_captures import EarlierCapture

PLANS = 8  # steps that are always kept
NODES = 10_000  # in their graphs: more steps are kept while they have fewer; a node takes about 5 kB
CAPTURED_NODES = 10_000  # in the graphs of all captures without a step
LEAST = 50  # nodes that each step counts for besides its own
KEPT = 256  # variants

Answers = tuple[Scalars, ...]


@dataclass(frozen=True, eq=False)
class CallFacts:
    """The facts of a call, and all else that decides which step runs it.

    Attributes:
        tensors: all that it reads, in the order of a graph's inputs.
        adds: gradients exist, or may at its backward.
        outputs: selects the outputs that backward starts from.
        read: reads the call again.
        walks: those that the facts were read by.
        rejected: the guards of variants that have failed for this call.
        found: the answers to the last of these, up to the one that failed.
    """

    facts: Facts
    tensors: list[Tensor]
    adds: bool
    outputs: OutputSelector
    read: Callable[[], CallFacts]
    walks: Sequence[AttributeWalk] = ()
    rejected: tuple[tuple[ValueGuard, ...], ...] = ()
    found: Answers = ()

    def after(self, failure: GuardFailed) -> CallFacts:
        """Return the call once a guard has failed."""
        found = (*assumed(failure.guards)[: failure.guard], failure.actual)
        return replace(self, rejected=(*self.rejected, tuple(failure.guards)), found=found)

    def agrees(self, guards: tuple[ValueGuard, ...]) -> bool:
        """Return True if nothing that was found in this call contradicts a variant with these guards."""
        if not self.rejected:
            return True
        if guards in self.rejected or len(guards) < len(self.found):
            return False
        for guard, asked, found in zip(guards, self.rejected[-1], self.found, strict=False):
            if guard.question != asked.question:  # from here on it may ask for something else
                break
            if not same_values(guard.expected, found):
                return False
        return True


@dataclass(frozen=True, eq=False)
class Variant:
    """One capture.

    Attributes:
        captured: None once it was dropped.
        guards: the values that it rests on.
        preferred: submodules that run as they are in it because they ask for many values.
        steps: by whether they add to gradients.
    """

    assumptions: Assumptions
    captured: Captured | None
    guards: tuple[ValueGuard, ...]
    preferred: tuple[str, ...] = ()
    steps: dict[bool, Step] = field(default_factory=dict)

    def floats(self, facts: Facts) -> list[float] | None:
        """Return the floats that the graph takes of a call; None if the variant does not serve it.

        Their values may make another graph, or Python can't compute with them, or computes another type.
        """
        captured = self.captured
        if captured is None or not self.assumptions.holds(facts):
            return None
        values = {place: value for place in captured.float_values if (value := number_at(facts, place)) is not None}
        try:
            floats = [node.compute(values) for node in captured.floats]
            if any(node.compute(values) == number for node, number in captured.special_values):
                return None
        except (ArithmeticError, ValueError):
            return None
        return floats if all(type(value) is float for value in floats) else None

    @property
    def is_made_of_another(self) -> bool:
        """Return True if other numbers or lengths cost no trace of their own."""
        captured = self.captured
        return captured is not None and (bool(captured.float_values) or isinstance(captured.graph, LaterGraph))

    @property
    def serves_others(self) -> bool:
        """Return False for a backward from scalars alone where other calls may have room for all outputs."""
        return self.captured is not None and not any(step.report.all_outputs for step in list(self.steps.values()))

    @property
    def earlier(self) -> EarlierCapture:
        """The capture for a call that adds to gradients if this one does not, or that comes again."""
        assert self.captured is not None
        for step in list(self.steps.values()):
            return EarlierCapture(self.captured, step.parts.accumulated_plan, step.report.all_outputs)
        return EarlierCapture(self.captured)


class Found(NamedTuple):
    """The variant that serves a call, its step for that if there is one, and the floats that it takes."""

    variant: Variant
    step: Step | None
    floats: list[float]


class Variants:
    """The variants of one module, the latest used first."""

    def __init__(self) -> None:
        self._all: tuple[Variant, ...] = ()
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Variant]:
        return iter(self._all)

    @property
    def steps(self) -> list[Step]:
        """All steps, the least recently used first."""
        return [*dict.fromkeys(step for variant in reversed(self._all) for step in list(variant.steps.values()))]

    def find(self, call: CallFacts) -> Found | None:
        """Return what serves a call: a variant with a step for it if there is one."""
        found: Found | None = None
        with self._lock:
            for variant in self._all:
                step = variant.steps.get(call.adds)
                if not call.agrees(variant.guards) or (found is not None and step is None):
                    continue
                floats = variant.floats(call.facts)
                if floats is not None and step is not None:
                    return Found(variant, step, floats)
                if floats is not None:
                    found = Found(variant, None, floats)
        return found

    def of_kind(self, call: CallFacts) -> list[Variant]:
        """Return the variants of this kind of call that differ in values alone, the latest first."""
        return [each for each in self._all if each.guards and each.assumptions.holds(call.facts)]

    def note_use(self, variant: Variant, adds: bool) -> None:
        """Let a variant be tried first from now on; its steps that add to gradients, or do not, were used last."""
        with self._lock:
            if next(reversed(variant.steps), adds) is not adds and adds in variant.steps:
                variant.steps[adds] = variant.steps.pop(adds)
            if self._all[:1] != (variant,) and variant in self._all:  # another thread may have dropped it by now
                self._all = variant, *(each for each in self._all if each is not variant)

    def add(self, variant: Variant) -> None:
        """Add a new variant, in place of those that it can replace."""
        with self._lock:
            others = [each for each in self._all if not _replaces(variant, each)]
            self._all = (variant, *others)[:KEPT]

    def trim(self, keeps_captures: bool) -> None:
        """Drop the least recently used steps, and captures without one, beyond what is kept."""
        with self._lock:
            while len(steps := self.steps) > PLANS and sum(map(_weight, steps)) > NODES:
                last = next(each for each in reversed(self._all) if each.steps)
                if last is self._all[0]:  # the call that runs now
                    break
                self.drop(last, keeps_captures)
            nodes = 0
            for variant in self._all:
                if variant.captured is not None and not variant.steps:
                    nodes += len(variant.captured.graph.graph.nodes)
                    if nodes > CAPTURED_NODES:
                        self._replace(variant, None)

    def drop(self, variant: Variant, keeps_capture: bool) -> None:
        """Drop the steps of a variant, and its capture unless that is kept; one with symbols gives it again."""
        with self._lock:
            captured = variant.captured
            is_made_again = captured is None or (isinstance(captured.graph, LaterGraph) and not captured.graph.is_made)
            keeps = keeps_capture and variant.serves_others and not is_made_again
            self._replace(variant, captured if keeps else None)

    def _replace(self, variant: Variant, captured: Captured | None) -> None:
        left = replace(variant, captured=captured, steps={})
        kept = (left,) if captured is not None or variant.guards else ()
        self._all = tuple(new for each in self._all for new in (kept if each is variant else (each,)))


def assumed(guards: Sequence[ValueGuard]) -> Answers:
    """Return the answers that a capture with these guards rests on."""
    return tuple(guard.expected for guard in guards)


def _replaces(new: Variant, old: Variant) -> bool:
    """Return True if a variant serves all calls that an older one serves."""
    return new.guards == old.guards and new.assumptions.holds(old.assumptions.facts)


def _weight(step: Step) -> int:
    """Return the nodes that a step counts for; more, if it holds memory or slots in a tier."""
    nodes = LEAST + len(step.report.forecast.trace.ops)
    resources = step.parts.tier, step.parts.state_slots, step.cuda_graphs
    return nodes if all(resource is None for resource in resources) else max(nodes, NODES // PLANS)
