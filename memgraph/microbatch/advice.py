"""Whether micro-batches would help a call that no plan fits: tried, before an error recommends them.

"... a smaller batch"   ->   "... microbatches= or a smaller batch", if the rows go through on their own, and at any op
                             less of them has to lie there
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from passes import BudgetError, Machine
from passes.analysis.reuse_gaps import ReuseGaps
from passes.explain import PARTS, SMALLER
from passes.lp.problem import PlanProblem

from ..capture.capture import capture
from ..errors import CaptureError
from ..graph.summarize import summarize
from ..guards.module_proxy import WithLoss
from ..system.device import unused_nbytes
from ..tensors.loss_outputs import OutputSelector
from .check_independence import require_row_independence
from .microbatches import MicroBatches


def suggest_microbatches(
    error: BudgetError, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: OutputSelector,
    graph: fx.Graph, machine: Machine,
) -> BudgetError:  # fmt: skip
    """The error, which names micro-batches where a smaller batch would help and they are as good; `graph` is the call's
    as it is."""
    text = str(error)
    if SMALLER not in text or not _parts_help(module, args, kwargs, wanted, graph, machine):
        return error
    return BudgetError(text.replace(SMALLER, f"{PARTS} or {SMALLER}"), error.budget, error.smallest)


def _parts_help(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: OutputSelector,
    graph: fx.Graph,
    machine: Machine,
) -> bool:
    """Whether the batch may be cut in two, and what no plan can do without is less then."""
    cut = _cut(module)
    if cut is None:
        return False
    try:
        require_row_independence(cut, args, kwargs, unused_nbytes(torch.device(machine.device)) // 2)
        parts = capture(cut, args, kwargs, grad=torch.is_grad_enabled(), wanted=wanted)
    except CaptureError:
        return False
    return _floor(parts.graph.graph, machine) < _floor(graph, machine)


def _cut(module: nn.Module) -> nn.Module | None:
    """The module as `microbatches=2` would have it; None if it takes its batch in parts already."""
    if isinstance(module, MicroBatches):
        return None
    if isinstance(module, WithLoss):
        inside, loss = _cut(module._module), module._loss
        return None if inside is None else WithLoss(inside, loss)
    return MicroBatches(module, 2)


def _floor(graph: fx.Graph, machine: Machine) -> int:
    return int(PlanProblem(ReuseGaps(summarize(graph)), machine).floor.max(initial=0))
