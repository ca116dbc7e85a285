"""The stages of a step: their traces, and the values that they send to each other.

rank 0: the best cut under all budgets    ->    the same places on every rank
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from passes import Trace
from passes.stages.cut import Cut
from passes.stages.places import by_module

from .ranks.messages import Message
from .whole_step import WholeStep


@dataclass(frozen=True, eq=False)
class StageCut:
    """A step, cut at places: stage k has those from `begins[k]` on."""

    step: WholeStep
    begins: tuple[int, ...]

    @classmethod
    def of(cls, step: WholeStep, cut: Cut) -> StageCut:
        return cls(step, tuple(stage.begin for stage in cut.stages))

    @cached_property
    def nominal(self) -> StageCut:
        """The same cut of the step with nominal prices."""
        return StageCut(self.step.nominal, self.begins)

    @cached_property
    def traces(self) -> tuple[Trace, ...]:
        ends = (*self.begins[1:], self.step.costs.borders[-1])
        return tuple(self.step.stage(begin, end) for begin, end in zip(self.begins, ends, strict=True))

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Return all values that stages send, in an order that is the same on all ranks."""
        fakes = {node.name: node for node in self.step.captured.graph.graph.nodes}
        made = {value: k for k, trace in enumerate(self.traces) for _, value in self._sent(trace)}
        return tuple(
            Message(op.name, fakes[op.name].meta["val"], made[op.name], k)
            for k, trace in enumerate(self.traces)
            for op in trace.ops
            if op.is_input and op.name in made and made[op.name] != k
        )

    @cached_property
    def drawn(self) -> tuple[int, ...] | None:
        """Return how many random numbers each stage draws; None if that is not known before."""
        if self.step.drawn is None:
            return None
        own = ([op.name for op in trace.ops if not op.is_input] for trace in self.traces)
        return tuple(sum(self.step.drawn.get(name, 0) for name in names) for names in own)

    def sent_backward(self, stage: int) -> list[Message]:
        return [message for message in self.messages if message.sender == stage and message.receiver < stage]

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """Map each parameter that gets a gradient to the stages that make it, or parts of it."""
        owners: dict[str, list[int]] = {}
        for k, trace in enumerate(self.traces):
            for name in dict.fromkeys(self.gradient_names(trace)):
                owners.setdefault(name, []).append(k)
        return {name: tuple(stages) for name, stages in owners.items()}

    def gradient_names(self, trace: Trace) -> list[str]:
        """Return the parameters of the gradients that a stage makes, in the order of its outputs."""
        return [self.step.gradients[value] for kind, value in trace.outputs if kind == "gradient"]

    def tensors(self, stage: int) -> frozenset[str]:
        """Return the names of the parameters and buffers that a stage reads."""
        known = self.step.tensors
        return frozenset(known[op.name] for op in self.traces[stage].ops if op.name in known)

    def owned(self, names: Collection[str]) -> tuple[frozenset[str], ...]:
        """Return which of all parameters and buffers each stage has.

        One that no stage reads is where others of its module are, or else in the first.
        """
        read = [self.tensors(stage) for stage in range(len(self.begins))]
        owned = [set(each) for each in read]
        for own in by_module(names).values():
            unread = set(own) - set().union(*read)
            owned[next((k for k, each in enumerate(read) if not each.isdisjoint(own)), 0)] |= unread
        return tuple(map(frozenset, owned))

    def shared(self, stage: int) -> list[str]:
        """Return the parameters of a stage whose gradients other stages make parts of."""
        return sorted(name for name, stages in self.owners.items() if len(stages) > 1 and stage in stages)

    def _sent(self, trace: Trace) -> Sequence[tuple[str, str]]:
        return [each for each in trace.outputs if each[0] != "gradient"]
