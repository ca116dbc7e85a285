"""The run of one mini-batch: its micro-batches, and the gradients that they are added to.

x: 8 rows, 4 micro-batches    ->    forward and backward of 2 rows, four times; parameters and x have gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ..capture.capture import operands
from ..profile.memory_meter import measure_peak, resident_bytes
from ..tensors.pytree import flatten
from .chunks import MicroBatch
from .mini_batch_plan import MiniBatchPlan
from .ranks.stage_group import StageGroup
from .stage_runs import Named, StageRuns
from .state.random_numbers import RandomNumbers
from .state.shared_parameters import SharedGradients, make_gradients


def run_mini_batch(
    group: StageGroup, module: nn.Module, plan: MiniBatchPlan, args: tuple[Any, ...], kwargs: dict[str, Any],
    divided: Callable[[tuple[Any, ...], dict[str, Any]], list[MicroBatch]], loss_scale: float,
) -> StageRuns:  # fmt: skip
    """Run a mini-batch in its micro-batches, and add to gradients."""
    parameters: Named = dict(module.named_parameters())
    shared = SharedGradients(group, parameters, plan.owners)
    shared.begin()
    make_gradients(parameters, plan.gradients)
    make_gradients(_named(module, plan.arguments[0], args, kwargs), plan.input_gradients[0])
    batches = divided(args, kwargs)
    pairs = zip(plan.arguments, batches, strict=True)
    tensors = [_named(module, names, batch.args, batch.kwargs) for names, batch in pairs]
    gradients = [
        {name: each[name].grad for name in names} for each, names in zip(tensors, plan.input_gradients, strict=True)
    ]
    random = RandomNumbers.shared(group, plan.drawn, plan.schedule.stages) if plan.draws else None
    runs = StageRuns(group, plan, parameters, tensors, gradients, [each.share for each in batches], random, loss_scale)
    runs.run()
    if random is not None:
        random.end()
    shared.finish()
    return runs


def kept_tensors(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of a module and of a call, and their gradients."""
    given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    tensors = [*module.parameters(), *module.buffers(), *given]
    return [*tensors, *(tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None)]


def measured(run: Callable[[], StageRuns], kept: Iterable[Any]) -> tuple[StageRuns, int | None]:
    """Run a mini-batch; return also the most bytes that were allocated, `kept` included, or None within a profiler."""
    before = resident_bytes(each for each in kept if isinstance(each, Tensor) and not each.is_meta)
    runs, allocation = measure_peak(run)
    return runs, None if allocation is None else before + allocation.peak


def _named(module: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Named:
    """Return the tensors that a call reads, by their names in its graph."""
    return dict(zip(names, operands(module, args, kwargs), strict=False))
