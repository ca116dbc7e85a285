"""The bytes of a rank besides the step of its stage.

the whole model, the mini-batch, gradients that are being sent    ->    bytes that its plan may not use
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from passes import Trace

from .action_order import StageOrder
from .messages import Message

MESSAGES = 4096  # bytes of losses and of small messages between ranks


@dataclass(frozen=True)
class StageBudget:
    """The bytes of one stage.

    Attributes:
        budget: of its rank.
        others: bytes that lie beside the step: parameters of other stages, the mini-batch, messages.
    """

    budget: int
    others: int

    @classmethod
    def of(
        cls, budget: int, model_nbytes: int, batch_nbytes: int, trace: Trace, order: StageOrder,
        sent: Iterable[Message], shared_nbytes: int,
    ) -> StageBudget:  # fmt: skip
        """Return the bytes of a stage with this trace.

        Args:
            sent: the gradients that it sends.
            shared_nbytes: of its parameters that other stages have as well.
        """
        own = sum(op.nbytes for op in trace.ops if op.fn in ("parameter", "buffer"))
        messages = list(sent)
        late = max((order.unread_gradients(message.receiver) for message in messages), default=0)
        waiting = late * sum(message.nbytes for message in messages)
        values = 0
        if trace.boundary == len(trace.ops):  # without a backward, no plan counts open forwards
            held = {s for _, value in trace.outputs for s in trace.op[value].holds}
            values = (order.open_forwards - 1) * sum(trace.nbytes[s] for s in held)
        return cls(budget, model_nbytes - own + batch_nbytes + waiting + values + 2 * shared_nbytes + MESSAGES)
