"""Plan backward for the scalar outputs alone, where forward can't run again and no plan for all outputs fits.

(loss, logits), for both 13.70 MB of 13.14 needed   ->   (loss, logits), for the loss 11.20 MB

A gradient of the logits is then refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from passes import BudgetError, Machine, Trace, predict

from ..capture.reentrant_forward import can_run_again
from ..errors import PlanError
from ..tensors.loss_outputs import select_losses, select_scalars, select_scalars_only
from .step_graph import Call, StepGraph


@dataclass(frozen=True, eq=False)
class OtherOutputsDropped:
    """A call to plan instead, with a backward from its scalars alone, and the bytes that one from all outputs needs."""

    call: Call
    needed_nbytes: int


def with_scalars_only(call: Call, graph: StepGraph) -> Call | None:
    """Return the call with a backward from its scalars alone; None if it has no other, or forward can run again."""
    captured = graph.traced
    scalars = [place for place in captured.tangents if graph.numel(place) == 1]
    if call.outputs not in (select_losses, select_scalars) or len(scalars) in (0, len(captured.tangents)):
        return None
    return None if can_run_again(captured) else replace(call, outputs=select_scalars_only, general=None)


def needed_nbytes(error: BudgetError | PlanError, trace: Trace, machine: Machine) -> int:
    """Return a budget for which there is a plan, after an error that says there is none."""
    return error.smallest if isinstance(error, BudgetError) else predict(trace, machine).peak
