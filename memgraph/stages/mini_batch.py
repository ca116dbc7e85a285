r"""The run of one mini-batch: its micro-batches, and the gradients that they are added to.

x: 8 rows, 4 micro-batches    ->    forward and backward of 2 rows, four times; parameters and x have gradients

Gradients of parameters that several stages read: each makes a part, and the parts are added once a step.

stage 0: part of the table's gradient  \
                                         ->   their sum, on both
stage 3: part of the table's gradient  /
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.capture import operands
from ..profile.memory_meter import measure_peak, resident_bytes
from ..tensors.pytree import flatten
from .chunks import MicroBatch
from .mini_batch_plan import MiniBatchPlan
from .ranks.messages import Message, receive, send, wait_for
from .ranks.stage_group import StageGroup
from .stage_runs import Named, StageRuns
from .state.random_numbers import RandomNumbers


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


class SharedGradients:
    """The shared parameters of one rank, and the ranks that have each of them."""

    def __init__(
        self, group: StageGroup, parameters: Mapping[str, Tensor], owners: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.group, self.parameters = group, parameters
        self.owners = {name: sorted({stage % group.ranks for stage in stages}) for name, stages in owners.items()}
        self.names = sorted(name for name, ranks in self.owners.items() if len(ranks) > 1 and group.rank in ranks)
        self._earlier: list[Tensor | None] = []

    def begin(self) -> None:
        """Set aside the gradients of earlier steps, which are sums already."""
        self._earlier = [self.parameters[name].grad for name in self.names]
        for name in self.names:
            self.parameters[name].grad = None

    def finish(self) -> None:
        """Add the parts of all ranks, in their order, and then the gradients of earlier steps."""
        for name, earlier in zip(self.names, self._earlier, strict=True):
            gradient = self.parameters[name].grad
            assert gradient is not None
            self._sum(name, gradient, self.owners[name])
            if earlier is not None:
                self.parameters[name].grad = earlier.add_(gradient)
        self._earlier = []

    def _sum(self, name: str, gradient: Tensor, ranks: Sequence[int]) -> None:
        first, rank = ranks[0], self.group.rank
        if rank != first:
            wait_for(self.group, send(self.group, [(Message(name, gradient, rank, first), gradient)]))
            gradient.copy_(receive(self.group, [Message(name, gradient, first, rank)]).wait()[name])
            return
        for other in ranks[1:]:
            gradient.add_(receive(self.group, [Message(name, gradient, other, first)]).wait()[name])
        works = send(self.group, [(Message(name, gradient, first, other), gradient) for other in ranks[1:]])
        wait_for(self.group, works)


def make_gradients(parameters: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Let each parameter have a gradient to add to."""
    for name in dict.fromkeys(names):
        parameter = parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
