"""Try whether micro-batches would help a call that no plan fits, before an error recommends them.

"... a smaller batch"   ->   "... microbatches= or a smaller batch", if rows are independent, and the lower bound on
                             memory is less with micro-batches
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor

from passes import BudgetError, Machine
from passes.explain import PARTS, SMALLER
from passes.lp.problem import proven_nbytes

from ..capture.capture import capture
from ..errors import CaptureError
from ..graph.summarize import summarize
from ..guards.module_proxy import WithLoss
from ..profile.measuring_room import room_nbytes
from ..profile.memory_meter import argument_nbytes, resident_bytes
from ..system.trial_room import ops_within
from ..tensors.gradients import existing_gradients
from ..tensors.loss_outputs import OutputSelector
from ..tensors.pytree import flatten
from .check_independence import require_row_independence
from .microbatches import MicroBatches


def suggest_microbatches(
    error: BudgetError, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: OutputSelector,
    graph: fx.Graph, machine: Machine,
) -> BudgetError:  # fmt: skip
    """Return the error, which names micro-batches if they would help. `graph` is that of the whole batch."""
    text = str(error)
    if SMALLER not in text or not _would_help(module, args, kwargs, wanted, graph, machine):
        return error
    text = text.replace(SMALLER, f"{PARTS} or {SMALLER}")
    return BudgetError(text, error.budget, error.smallest, error.timed_out, error.released)


def _would_help(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: OutputSelector,
    graph: fx.Graph,
    machine: Machine,
) -> bool:
    """Return True if the batch may be split in two, and no plan needs as much then."""
    split = _split(module)
    if split is None:
        return False
    held = [*module.parameters(), *module.buffers(), *existing_gradients(module.parameters())]
    device = torch.device(machine.device)
    room = room_nbytes(machine.budget, device, resident_bytes(held), argument_nbytes(args, kwargs))
    without_values = any(isinstance(leaf, FakeTensor) for leaf in flatten((args, kwargs))[0])
    try:
        require_row_independence(split, args, kwargs, None if without_values else device, room)
        with ops_within(room):
            parts = capture(split, args, kwargs, grad=torch.is_grad_enabled(), wanted=wanted)
    except CaptureError:
        return False
    return _least_nbytes(parts.graph.graph, machine) < _least_nbytes(graph, machine)


def _split(module: nn.Module) -> nn.Module | None:
    """Return the module with `microbatches=2`; None if it has micro-batches."""
    if isinstance(module, MicroBatches):
        return None
    if isinstance(module, WithLoss):
        inside, loss = _split(module._module), module._loss
        return None if inside is None else WithLoss(inside, loss)
    return MicroBatches(module, 2)


def _least_nbytes(graph: fx.Graph, machine: Machine) -> int:
    return proven_nbytes(summarize(graph), machine)
