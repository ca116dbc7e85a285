"""Forward and backward of the micro-batches of one mini-batch, on the rank of a stage.

receive, forward, send        for each micro-batch, in the order of the schedule; what is sent is waited for
receive, backward, send       when the receiver must have asked for it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..runtime.step_run import StepRun
from .messages import Message, Work, receive, send, wait_for
from .mini_batch_plan import MiniBatchPlan
from .planned_stage import PlannedStage
from .stage_group import StageGroup

Named = dict[str, Tensor]


@dataclass(eq=False)
class StageRuns:
    """The runs of a stage in one mini-batch; without gradients, backward only ends a forward.

    Attributes:
        chunks: the tensors of each micro-batch, parameters and buffers among them, by their names in the graph.
        shares: of the rows that each micro-batch has.
        loss: the mean over the rows so far, on the rank that makes it.
    """

    group: StageGroup
    plan: MiniBatchPlan
    parameters: Named
    chunks: Sequence[Named]
    shares: Sequence[float]
    loss: Tensor | None = None
    _open: dict[int, StepRun] = field(default_factory=dict)
    _values: dict[int, list[Work]] = field(default_factory=dict)  # being sent, by micro-batch
    _gradients: dict[int, dict[int, list[Work]]] = field(default_factory=lambda: defaultdict(dict))  # also by receiver

    def run(self) -> None:
        """Run all micro-batches."""
        for action, chunk in self.plan.order.actions():
            self._forward(chunk) if action == "forward" else self._backward(chunk)
        for works in self._gradients.values():
            for each in works.values():
                wait_for(self.group, each)

    def _forward(self, chunk: int) -> None:
        stage, known = self.plan.stages[chunk], self.chunks[chunk]
        values = self._received(stage, stage.inputs)
        run = self._open[chunk] = StepRun(stage.halves, None)
        tensors = [values[name] if name in values else known[name] for name in stage.inputs]
        values.clear()
        outputs = dict(zip(stage.outputs, run.forward(tensors, len(stage.outputs)), strict=True))
        self._values[chunk] = send(self.group, self._to_send(stage, outputs))
        if stage.cut.step.loss in outputs:
            part = self.shares[chunk] * outputs[stage.cut.step.loss].detach()
            self.loss = part if self.loss is None else self.loss + part

    def _backward(self, chunk: int) -> None:
        order, run, stage = self.plan.order, self._open.pop(chunk), self.plan.stages[chunk]
        if stage.halves.backward is not None:
            for receiver, works in self._gradients.items():
                wait_for(self.group, works.pop(chunk - order.unread_gradients(receiver), []))
            values = self._received(stage, stage.tangents)
            start = torch.tensor(self.shares[chunk])
            tangents: list[Tensor | None] = []
            for fake, name in zip(stage.halves.tangents, stage.tangents, strict=True):
                tangents.append(values.pop(name) if name in values else start.to(fake.device, fake.dtype))
            gradients = [self.parameters[name].grad for name in stage.gradients]
            results = dict(zip(stage.results, run.backward(tangents, gradients, keep=False), strict=True))
            for message, value in self._to_send(stage, results):
                self._gradients[message.receiver].setdefault(chunk, []).extend(send(self.group, [(message, value)]))
        run.close()
        wait_for(self.group, self._values.pop(chunk))

    def _received(self, stage: PlannedStage, names: Sequence[str]) -> Named:
        rank = self.group.rank
        messages = [each for each in stage.cut.messages if each.receiver == rank and each.name in names]
        return dict(zip((each.name for each in messages), receive(self.group, messages), strict=True))

    def _to_send(self, stage: PlannedStage, values: Named) -> list[tuple[Message, Tensor]]:
        rank = self.group.rank
        return [(each, values[each.name]) for each in stage.cut.messages if each.sender == rank and each.name in values]
