"""The error of a call that no plan fits: a budget that works, and what acts on the bytes that are in the way.

453058 bytes are allowed; the smallest budget for which a plan was found is 702116.
That is for a call that adds to gradients, as with accumulation; one that adds to none needs 689796: accumulate=False
plans for that alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import passes
from passes.slices.whole_weight import Reason, WholeWeight, reason_lines

from ...errors import BudgetError
from ...profile.measuring_room import room_nbytes
from ...profile.memory_meter import argument_nbytes
from ..step_graph import Call, StepGraph

MUCH = 0.1  # share of the smallest budget from which on a weight that stays whole is named
STAY_WHOLE = "Weights that stay whole, where blocks of rows were looked for:"


def budget_error(
    error: passes.BudgetError, accumulated_nbytes: Callable[[], int], whole: Sequence[WholeWeight] = ()
) -> BudgetError:
    """Return the error to raise instead of `error`.

    Args:
        accumulated_nbytes: returns the bytes that the call needs once gradients exist; 0 if none ever do.
        whole: large weights that stay whole where blocks of rows were looked for.
    """
    needed, text = max(error.smallest, accumulated_nbytes()), str(error)
    if needed > error.smallest:
        text = (
            f"{_with_smallest(error, needed)}\nThat is for a call that adds to gradients, as with accumulation; one "
            f"that adds to none needs {error.smallest}: accumulate=False plans for that alone."
        )
    if error.released is not None:
        alone = " with accumulate=False" if needed > error.smallest else ""
        text += (
            "\nAll this counts the model's outputs until the step ends. In a loop that frees them before backward, "
            f"budget={error.released} works{alone}."
        )
    return BudgetError(f"{text}{_reasons(whole, needed)}", error.budget, needed)


def refuse_value_run(
    call: Call, graph: StepGraph, resident_nbytes: int, needed_nbytes: Callable[[int], int]
) -> None:  # fmt: skip
    """
    Args:
        resident_nbytes: of the module, its gradients and its optimizer that are on the device now.
        needed_nbytes: returns a budget for which the whole call has a plan, of so many bytes at least.

    Raises:
        BudgetError: the plain forward, which had to run for values that Python asks for, needs more than the budget.
    """
    nbytes, budget = graph.captured.value_run_nbytes, graph.target.budget
    batch_nbytes = argument_nbytes(call.args, call.kwargs)
    forward = nbytes + budget - room_nbytes(budget, graph.target.device, resident_nbytes, batch_nbytes)
    if nbytes and forward > budget:
        needed = needed_nbytes(forward)
        step = f", and the step {needed}" if needed > forward else ""
        because, instead = _of_value_run(graph)
        raise BudgetError(
            f"{budget} bytes are allowed; {because}, which takes {forward}{step}: give budget={needed}, a smaller "
            f"batch for the first step, or {instead}",
            budget, needed,
        )  # fmt: skip


def _of_value_run(graph: StepGraph) -> tuple[str, str]:
    """Return why forward runs once before the first step, and what would spare it."""
    if graph.captured.opaque and all(guard.op == "opaque" for guard in graph.captured.guards):
        paths = ", ".join(part.path for part in graph.captured.opaque)
        return (
            f"forward is run once, and backward of each part, to measure {paths}, which run as they are",
            "opaque=False",
        )
    because = "forward branches on values of tensors, and is run once without backward to find them"
    return because, "compute with torch.where or a mask instead"


def _reasons(whole: Sequence[WholeWeight], smallest: int) -> str:
    """Return lines for the weights whose bytes matter beside the smallest budget, and those that the caller keeps."""
    named = (each for each in whole if each.nbytes >= MUCH * smallest or each.reason is Reason.HELD)
    lines = reason_lines(named)
    return "\n".join(["", STAY_WHOLE, *lines]) if lines else ""


def _with_smallest(error: passes.BudgetError, smallest: int) -> str:
    """Return the error's text with another smallest budget."""
    text = str(error)
    for before in ("a plan was found is ", "budget="):
        text = re.sub(rf"{before}{error.smallest}\b", f"{before}{smallest}", text)
    return text
