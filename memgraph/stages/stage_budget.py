"""The bytes of a rank besides the step of its stage.

the mini-batch, gradients that are being sent, states of the optimizer    ->    bytes that its plan may not use
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from passes import Trace
from passes.stages.action import BACKWARD, FORWARD
from passes.stages.pipeline_schedule import NO_GRADIENTS, PipelineSchedule

from ..errors import StagesBudgetError
from .ranks.messages import Message

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
        budget: that it may take, if its rank has no other stage.
        others: bytes that lie beside the step: the mini-batch, messages, states of the optimizer.
        update: bytes of the rank while its optimizer updates.
    """

    budget: int
    others: int
    update: int

    @classmethod
    def of(
        cls, budget: int, batch_nbytes: int, trace: Trace, schedule: PipelineSchedule, number: int,
        sent: Iterable[Message], parameters: StageParameters,
    ) -> StageBudget:  # fmt: skip
        """Return the bytes of the stage `number`, which has this trace.

        Args:
            sent: the gradients that it sends.
        """
        own = sum(op.nbytes for op in trace.ops if op.fn in ("parameter", "buffer"))
        once = batch_nbytes + MESSAGES if number < schedule.ranks else 0  # for all stages of a rank
        resident = once + parameters.unread + parameters.states
        waiting = sum(schedule.unread(BACKWARD, number, each.receiver) * each.nbytes for each in sent)
        values = 0
        if trace.boundary == len(trace.ops):  # without a backward, no plan counts open forwards
            held = {s for _, value in trace.outputs for s in trace.op[value].holds}
            is_alone = schedule.name == NO_GRADIENTS
            receivers = range(number + 1, schedule.stages) if is_alone else ()
            late = max((schedule.unread(FORWARD, number, each) for each in receivers), default=0)
            most = max(late, schedule.open_forwards(number))  # the newest is an output of the forward that runs
            values = (most - 1) * sum(trace.nbytes[s] for s in held)
        others = resident + waiting + values + 2 * parameters.shared
        return cls(budget, others, resident + own + parameters.gradients + parameters.workspace)


def budgets_error(
    budgets: Sequence[int], needed: Sequence[int], stages: int, begins: Sequence[int] | None = None
) -> StagesBudgetError:
    """Return the error of ranks that need more than these budgets.

    Args:
        begins: where the stages begin, if another call has chosen that.
    """
    k = max(range(len(budgets)), key=lambda k: needed[k] - budgets[k])
    which = (
        f"stage {k} needs"
        if stages == len(budgets)
        else f"stages {', '.join(map(str, range(stages)[k :: len(budgets)]))} need"
    )
    where = "" if begins is None else f" to a new pipeline, with balance={[*begins]} for the same stages"
    return StagesBudgetError(
        f"no plan keeps the budgets of {stages} stages: {which} {needed[k]} bytes, and {budgets[k]} "
        f"are allowed; give budget={[*needed]}{where}, or more chunks",
        budgets,
        needed,
        begins,
    )
