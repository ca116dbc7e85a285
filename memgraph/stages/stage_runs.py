"""Forward and backward of the micro-batches of one mini-batch, on the rank of one stage or of several.

receive, forward, send                    for each micro-batch, in the order of the schedule; what is sent is waited
recompute, receive, backward, send        for when the receiver must have asked for it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from passes.stages.action import BACKWARD, FORWARD, WEIGHTS, Action
from passes.stages.pipeline_schedule import NO_GRADIENTS

from ..runtime.step_run import StepRun
from .mini_batch_plan import MiniBatchPlan
from .planned_stage import PlannedStage
from .ranks.messages import Message, Receipt, Work, receive, send, wait_for, with_layout
from .ranks.stage_group import StageGroup
from .state.random_numbers import RandomNumbers

Named = dict[str, Tensor]


class ActionTimes(NamedTuple):
    """When an action ran, in seconds of `time.perf_counter`.

    Attributes:
        recomputed: when what needs no gradient had run.
        received: when what it reads had come.
    """

    action: Action
    begin: float
    recomputed: float
    received: float
    end: float


@dataclass(eq=False)
class _OpenChunk:
    """A micro-batch in a stage between its forward and its end."""

    run: StepRun
    values: dict[str, Any] = field(default_factory=dict)  # of backward


@dataclass(eq=False)
class StageRuns:
    """The runs of a rank in one mini-batch.

    Attributes:
        chunks: the tensors of each micro-batch, parameters and buffers among them, by their names in the graph.
        input_gradients: gradients of some of them, to add to.
        shares: of the rows that each micro-batch has.
        random: sets the generator; None if no op draws.
        loss_scale: backward starts from the share of the rows, times this.
        loss: the mean over the rows so far, on the rank that makes it.
        times: of the actions that have run.
    """

    group: StageGroup
    plan: MiniBatchPlan
    parameters: Named
    chunks: Sequence[Named]
    input_gradients: Sequence[Mapping[str, Tensor | None]]
    shares: Sequence[float]
    random: RandomNumbers | None = None
    loss_scale: float = 1.0
    loss: Tensor | None = None
    times: list[ActionTimes] = field(default_factory=list)
    _open: dict[tuple[int, int], _OpenChunk] = field(default_factory=dict)
    _sent: dict[tuple[str, int, int], dict[int, list[Work]]] = field(default_factory=lambda: defaultdict(dict))
    _here: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)  # from a stage of this rank to another

    def run(self) -> None:
        """Run all micro-batches."""
        steps = {FORWARD: self._forward, BACKWARD: self._backward, WEIGHTS: self._weights}
        for action in self.plan.schedule.actions[self.group.rank]:
            begin, self.group.stage = perf_counter(), action.stage
            recomputed, received = steps[action.kind](action)
            self.times.append(ActionTimes(action, begin, recomputed or begin, received or begin, perf_counter()))
        for works in self._sent.values():
            for each in works.values():
                wait_for(self.group, each)

    def _forward(self, action: Action) -> tuple[float, float]:
        stage, known = self._stage(action), self.chunks[action.chunk]
        if self.plan.schedule.name == NO_GRADIENTS:
            self._settle(action)
        receipt = self._receive(action, stage.inputs)
        if self.random is not None:
            self.random.begin(action.stage, action.chunk)
        values = receipt.wait()
        received = perf_counter()
        run = StepRun(stage.halves, stage.tier)
        tensors = [values[name] if name in values else known[name].detach() for name in stage.inputs]
        values.clear()
        outputs = dict(zip(stage.outputs, run.forward(tensors, len(stage.outputs)), strict=True))
        self._send(action, outputs)
        if stage.cut.step.loss in outputs:
            part = self.shares[action.chunk] * outputs[stage.cut.step.loss].detach()
            self.loss = part if self.loss is None else self.loss + part
        if self.plan.schedule.name == NO_GRADIENTS:
            run.close()
        else:
            self._open[action[1:]] = _OpenChunk(run)
        return 0.0, received

    def _backward(self, action: Action) -> tuple[float, float]:
        stage, chunk = self._stage(action), self._open[action[1:]]
        recomputed = received = 0.0
        if stage.halves.backward is not None:
            self._settle(action)
            gradients = [self.parameters[name].grad for name in stage.gradients]
            chunk.values = stage.read_later(chunk.run.take_saved(), gradients)
            receipt = self._receive(action, stage.tangents)
            if stage.recompute is not None:
                stage.recompute.run(chunk.values, chunk.run.run_part)
            recomputed = perf_counter()
            chunk.values |= self._tangents(action, stage, receipt.wait())
            received = perf_counter()
            assert stage.backward is not None
            stage.backward.run(chunk.values, chunk.run.run_part)
            self._send(action, {name: chunk.values[name] for name in stage.results if name in chunk.values})
            for name, argument in stage.input_gradients:
                gradient = self.input_gradients[action.chunk][argument]
                assert gradient is not None
                gradient.add_(chunk.values[name])
            later = () if stage.weights is None else stage.weights.inputs
            chunk.values = {name: chunk.values[name] for name in later}
        self._end(action)
        return recomputed, received

    def _weights(self, action: Action) -> tuple[float, float]:
        stage, chunk = self._stage(action), self._open[action[1:]]
        if stage.weights is not None:
            stage.weights.run(chunk.values, chunk.run.run_part)
        self._end(action)
        return 0.0, 0.0

    def _end(self, action: Action) -> None:
        """Let go of a micro-batch: of its values after backward, of all that it holds after its last action."""
        if action.kind == BACKWARD:
            for (kind, sender, _), works in self._sent.items():
                if (kind, sender) == (FORWARD, action.stage):
                    wait_for(self.group, works.pop(action.chunk, []))
        if action.kind == self.plan.schedule.last_kind:
            self._open.pop(action[1:]).run.close()

    def _tangents(self, action: Action, stage: PlannedStage, values: Named) -> Named:
        """Return the gradients that backward starts from; that of the loss is the micro-batch's share of the rows."""
        start = self.shares[action.chunk] * self.loss_scale
        pairs = zip(stage.halves.tangents, stage.tangents, strict=True)
        return {
            name: values[name] if name in values else torch.full((), start, dtype=fake.dtype, device=fake.device)
            for fake, name in pairs
        }

    def _stage(self, action: Action) -> PlannedStage:
        return self.plan.stages[action.stage][action.chunk]

    def _settle(self, action: Action) -> None:
        """Wait for earlier messages of this kind, so that no more than planned are being sent."""
        for (kind, sender, receiver), works in self._sent.items():
            if (kind, sender) == (action.kind, action.stage):
                unread = self.plan.schedule.still_unread(receiver, list(works), action)
                for chunk in works.keys() - set(unread):
                    wait_for(self.group, works.pop(chunk))

    def _receive(self, action: Action, names: Sequence[str]) -> Receipt:
        """Ask for those of these values that another stage sends."""
        wanted = [each for each in self._messages(action) if each.receiver == action.stage and each.name in names]
        here = {each: self._here.pop((each.name, action.stage, action.chunk)) for each in wanted if self._is_own(each)}
        return receive(self.group, wanted, here)

    def _send(self, action: Action, values: Named) -> None:
        for each in self._messages(action):
            if each.sender == action.stage and each.name in values:
                if self._is_own(each):
                    self._here[each.name, each.receiver, action.chunk] = with_layout(each.fake, values[each.name])
                else:
                    works = self._sent[action.kind, action.stage, each.receiver].setdefault(action.chunk, [])
                    works += send(self.group, [(each, values[each.name])])

    def _messages(self, action: Action) -> Sequence[Message]:
        return self._stage(action).cut.messages

    def _is_own(self, message: Message) -> bool:
        ranks = self.plan.schedule.ranks
        return message.sender % ranks == message.receiver % ranks
