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
from .planned_stage import PlannedStage
from .stage_group import StageGroup

Named = dict[str, Tensor]


@dataclass(eq=False)
class StageRuns:
    """The runs of a stage in one mini-batch.

    Attributes:
        chunks: the tensors of each micro-batch, parameters and buffers among them, by their names in the graph.
        losses: of the micro-batches, on the rank that makes them.
    """

    group: StageGroup
    stage: PlannedStage
    parameters: Named
    chunks: Sequence[Named]
    losses: list[Tensor] = field(default_factory=list)
    _open: dict[int, StepRun] = field(default_factory=dict)
    _values: dict[int, list[Work]] = field(default_factory=dict)  # being sent, by micro-batch
    _gradients: dict[int, dict[int, list[Work]]] = field(default_factory=lambda: defaultdict(dict))  # also by receiver

    def run(self) -> None:
        """Run all micro-batches."""
        for action, chunk in self.stage.order.actions():
            self._forward(chunk) if action == "forward" else self._backward(chunk)
        for works in self._gradients.values():
            for each in works.values():
                wait_for(self.group, each)

    def _forward(self, chunk: int) -> None:
        values = self._received(self.stage.inputs)
        run = self._open[chunk] = StepRun(self.stage.halves, None)
        known = self.chunks[chunk]
        tensors = [values[name] if name in values else known[name] for name in self.stage.inputs]
        values.clear()
        outputs = dict(zip(self.stage.outputs, run.forward(tensors, len(self.stage.outputs)), strict=True))
        self._values[chunk] = send(self.group, self._to_send(outputs))
        if self.stage.cut.step.loss in outputs:
            self.losses.append(outputs[self.stage.cut.step.loss].detach().clone())

    def _backward(self, chunk: int) -> None:
        order, run = self.stage.order, self._open.pop(chunk)
        if self.stage.halves.backward is not None:
            for receiver, works in self._gradients.items():
                wait_for(self.group, works.pop(chunk - order.unread_gradients(receiver), []))
            values = self._received(self.stage.tangents)
            start = torch.tensor(1.0 / order.chunks)
            tangents: list[Tensor | None] = []
            for fake, name in zip(self.stage.halves.tangents, self.stage.tangents, strict=True):
                tangents.append(values.pop(name) if name in values else start.to(fake.device, fake.dtype))
            gradients = [self.parameters[name].grad for name in self.stage.gradients]
            results = dict(zip(self.stage.results, run.backward(tangents, gradients, keep=False), strict=True))
            for message, value in self._to_send(results):
                self._gradients[message.receiver].setdefault(chunk, []).extend(send(self.group, [(message, value)]))
        run.close()
        wait_for(self.group, self._values.pop(chunk))

    def _received(self, names: Sequence[str]) -> Named:
        rank = self.group.rank
        messages = [each for each in self.stage.cut.messages if each.receiver == rank and each.name in names]
        return dict(zip((each.name for each in messages), receive(self.group, messages), strict=True))

    def _to_send(self, values: Named) -> list[tuple[Message, Tensor]]:
        rank = self.group.rank
        return [
            (each, values[each.name]) for each in self.stage.cut.messages if each.sender == rank and each.name in values
        ]
