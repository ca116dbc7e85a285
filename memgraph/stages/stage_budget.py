"""The bytes of a rank besides the step of its stage.

the mini-batch, gradients that are being sent, states of the optimizer    ->    bytes that its plan may not use
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from passes import Trace

from ..errors import BudgetError
from .action_order import StageOrder
from .messages import Message

MESSAGES = 4096  # bytes of losses and of small messages between ranks


@dataclass(frozen=True)
class StageParameters:
    """Bytes that follow from the parameters of a stage.

    Attributes:
        gradients: of all that it trains.
        shared: of those that other stages have as well.
        unread: of those that no op reads, which are kept here, and of gradients that backward does not add to.
        states, workspace: what their optimizer keeps, and what an update allocates besides.
    """

    gradients: int
    shared: int
    unread: int
    states: int
    workspace: int


@dataclass(frozen=True)
class StageBudget:
    """The bytes of one stage.

    Attributes:
        budget: of its rank.
        others: bytes that lie beside the step: the mini-batch, messages, states of the optimizer.
        update: bytes of the rank while its optimizer updates.
    """

    budget: int
    others: int
    update: int

    @classmethod
    def of(
        cls, budget: int, batch_nbytes: int, trace: Trace, order: StageOrder, sent: Iterable[Message],
        parameters: StageParameters,
    ) -> StageBudget:  # fmt: skip
        """Return the bytes of a stage with this trace.

        Args:
            sent: the gradients that it sends.
        """
        own = sum(op.nbytes for op in trace.ops if op.fn in ("parameter", "buffer"))
        resident = batch_nbytes + parameters.unread + parameters.states + MESSAGES
        messages = list(sent)
        late = max((order.unread_gradients(message.receiver) for message in messages), default=0)
        waiting = late * sum(message.nbytes for message in messages)
        values = 0
        if trace.boundary == len(trace.ops):  # without a backward, no plan counts open forwards
            held = {s for _, value in trace.outputs for s in trace.op[value].holds}
            values = (order.open_forwards - 1) * sum(trace.nbytes[s] for s in held)
        others = resident + waiting + values + 2 * parameters.shared
        return cls(budget, others, resident + own + parameters.gradients + parameters.workspace)


def budgets_error(budgets: Sequence[int], smallest: Sequence[int]) -> BudgetError:
    """Return the error of stages that need more than these budgets."""
    k = max(range(len(budgets)), key=lambda k: smallest[k] - budgets[k])
    return BudgetError(
        f"no plan keeps the budgets of {len(budgets)} stages: stage {k} needs {smallest[k]} bytes, and {budgets[k]} "
        f"are allowed; give budget={list(smallest)}, or more chunks",
        budgets[k],
        smallest[k],
    )
