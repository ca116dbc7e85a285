"""Run a module on micro-batches, and join the results.

    y = model(x)      ->   x_0, x_1 = x.tensor_split(2);   y = cat([model(x_0), model(x_1)])
    l = model(x, t)   ->   l = model(x_0, t_0) * (n_0 / n) + model(x_1, t_1) * (n_1 / n)      # reduction="mean"

Tensors with as many rows as the first one are split, as `torch.distributed.pipelining` does; other arguments are given
to each micro-batch. Each uses aliases of the parameters, so that autograd first sums the gradients within a
micro-batch. The last one runs first: autograd starts with what ran last, so sums are those of a loop over micro-batches
that calls `backward` in each.

A mean is one over rows. A cross entropy that the module returns is a mean over targets, as it is for the whole batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from ..graph.provenance import running_microbatch
from ..guards.attribute_snapshot import AttributeSnapshot
from ..guards.attribute_writes import attribute_writes
from ..guards.module_proxy import ModuleProxy
from ..tensors.loss_outputs import custom_functions
from ..tensors.pytree import Spec, flatten, tensors_of, unflatten

INSTEAD = "use microbatches=1"


class MicroBatches(ModuleProxy):
    """`module`, run on at most `count` micro-batches.

    `reduction` says how a scalar follows from those of the micro-batches: their sum, or their mean by rows.
    """

    def __init__(self, module: nn.Module, count: int, reduction: str | None = None) -> None:
        super().__init__(module)
        self.__dict__ |= {"_count": count, "_reduction": reduction}

    def __reduce__(self) -> Any:
        return MicroBatches, (self._module, self._count, self._reduction)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten((args, kwargs))
        rows = microbatch_sizes(leaves, self._count)
        if len(rows) == 1:
            return self._module(*args, **kwargs)
        split = _split(leaves, len(rows))
        parts = [self._run(i + 1, unflatten(split[i], spec), rows[i]) for i in reversed(range(len(rows)))]
        return _join(parts[::-1], self._reduction)

    def _run(self, number: int, call: Any, rows: int) -> MicroBatch:
        named = {name: torch.ops.aten.alias.default(parameter) for name, parameter in self._module.named_parameters()}
        before = AttributeSnapshot(self._module, list(self._module.parameters()))
        with running_microbatch(number), LossTargetCounter() as targets:
            result = torch.func.functional_call(self._module, named, *call)
            after = AttributeSnapshot(self._module, list(named.values()))
        _refuse_writes(before, after)
        _keep_in_backward(self._module, named, tensors_of(flatten(result)[0]))
        # Recurrent layers keep a list of their weights, which would keep the aliases.
        if before.changed(after) is None:
            before.restore()
        return MicroBatch.of(result, rows, targets)


def _refuse_writes(before: AttributeSnapshot, after: AttributeSnapshot) -> None:
    """
    Raises:
        CaptureError: a micro-batch leaves in attributes what the whole batch would not.
    """
    for write in attribute_writes(before, after).items:
        part = write.attribute.part()
        is_new = write.where not in before.tokens and not write.holds_tensors
        if write.settles or is_new or (part is not None and write.attribute.name in _weights_set_by_hooks(part)):
            continue
        raise CaptureError(
            f"forward changes {write.change}, and would do so in each micro-batch, where a batch does it once: return "
            f"it, do it outside of forward, or {INSTEAD}"
        ).about(write.where)


def _weights_set_by_hooks(part: nn.Module) -> set[Any]:
    """Hooks of torch.nn.utils (weight_norm, prune) compute these weights before each forward, in each the same."""
    hooks = part._forward_pre_hooks.values()
    return {getattr(hook, attribute, None) for hook in hooks for attribute in ("name", "_tensor_name")}


def _keep_in_backward(module: nn.Module, named: dict[str, Tensor], results: Sequence[Tensor]) -> None:
    """Let functions whose backward runs a part of the module again find the parameters of their micro-batch there."""
    for node in custom_functions(result.grad_fn for result in results):
        running = ExitStack()

        def begin(_: object, running: ExitStack = running) -> None:
            running.enter_context(stateless._reparametrize_module(module, named, tie_weights=True))

        def end(*_: object, running: ExitStack = running) -> None:
            running.close()

        node.register_prehook(begin)
        node.register_hook(end)


@dataclass(frozen=True)
class MicroBatch:
    """The module's result for one micro-batch."""

    leaves: tuple[Any, ...]
    counts: tuple[Tensor | None, ...]  # of targets, for leaves that are means over them
    spec: Spec
    rows: int

    @classmethod
    def of(cls, result: Any, rows: int, targets: LossTargetCounter) -> MicroBatch:
        leaves, spec = flatten(result)
        return cls(tuple(leaves), tuple(map(targets.of, leaves)), spec, rows)


def microbatch_sizes(leaves: Sequence[Any], count: int) -> tuple[int, ...]:
    """Return the rows of each micro-batch; none is empty unless the batch is."""
    rows = batch_size(leaves)
    count = max(1, min(count, rows))
    return tuple(rows // count + (i < rows % count) for i in range(count))


def batch_size(leaves: Sequence[Any]) -> int:
    """Return the rows of the first tensor that has a dimension.

    Raises:
        CaptureError: there is none.
    """
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    raise CaptureError("microbatches cuts the batch along dimension 0, and no argument is a tensor that has one")


def is_batched(leaf: Any, rows: int) -> bool:
    """Return True if an argument has the rows of the batch."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


def _split(leaves: Sequence[Any], count: int) -> list[list[Any]]:
    """Return the arguments of each micro-batch."""
    rows = batch_size(leaves)
    columns = [leaf.tensor_split(count) if is_batched(leaf, rows) else (leaf,) * count for leaf in leaves]
    return [list(part) for part in zip(*columns, strict=True)]


def _join(parts: Sequence[MicroBatch], reduction: str | None) -> Any:
    spec = parts[0].spec
    if any(part.spec != spec for part in parts):
        raise CaptureError(f"the module returns results of other forms for other numbers of rows: {INSTEAD}")
    return unflatten([_join_leaf(parts, place, reduction) for place in range(len(parts[0].leaves))], spec)


def _join_leaf(parts: Sequence[MicroBatch], place: int, reduction: str | None) -> Any:
    first, *others = column = [part.leaves[place] for part in parts]
    if not isinstance(first, Tensor):
        if any(type(leaf) is not type(first) or leaf != first for leaf in others):
            raise CaptureError(f"the module returns {first!r} for one part of the batch, and another value for others")
        return first
    if all(is_batched(leaf, part.rows) for leaf, part in zip(column, parts, strict=True)):
        return torch.cat(column)
    if any(leaf.dim() for leaf in column):
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in column)
        raise CaptureError(
            f"the module returns tensors of shapes {shapes} for parts of {', '.join(str(part.rows) for part in parts)} "
            f"rows, which are no rows of a whole: return a row for each row of the batch, or scalars, or {INSTEAD}"
        )
    return _reduce(column, parts, [part.counts[place] for part in parts], reduction)


def _reduce(
    scalars: Sequence[Tensor], parts: Sequence[MicroBatch], counts: Sequence[Tensor | None], reduction: str | None
) -> Tensor:
    if reduction is None:
        raise CaptureError(
            "the module returns a scalar, and microbatches must know how it comes from those of the parts: give "
            'reduction="mean" if it is a mean over the rows of the batch, "sum" if it is a sum; or return the outputs, '
            "and compute the loss from them all (loss=, or outside)"
        )
    if reduction == "mean":
        counted = [count for count in counts if count is not None]
        if len(counted) == len(parts):
            total = _sum(counted)
            # In float64: integers divided give float32 for scalars of any dtype.
            scalars = [
                zero_if_empty(one, n) * (n.double() / total).to(one.dtype)
                for one, n in zip(scalars, counted, strict=True)
            ]
        else:
            rows = sum(part.rows for part in parts)
            scalars = [one * (part.rows / rows) for one, part in zip(scalars, parts, strict=True)]
    return _sum(scalars)


def zero_if_empty(mean: Tensor, count: Tensor) -> Tensor:
    """Return a mean over so many targets, but 0 if there are none."""
    return torch.where(count > 0, mean, torch.zeros_like(mean))


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


CROSS_ENTROPIES: dict[Callable[..., Any], inspect.Signature] = {
    function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)
}


class LossTargetCounter(TorchFunctionMode):
    """Counts the targets of each cross entropy that runs in this mode.

    with LossTargetCounter() as targets:
        loss = F.cross_entropy(out, target)          # ignore_index=-100
    targets.of(loss)                                 # (target != -100).sum()
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[tuple[Tensor, Tensor]] = []

    def of(self, loss: Tensor) -> Tensor | None:
        """Return the number of targets, by their weights, if this is itself a mean over them."""
        return next((count for mean, count in self.counts if mean is loss), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CROSS_ENTROPIES:
            bound = CROSS_ENTROPIES[func].bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            self._note(result, **bound.arguments)
        return result

    def _note(
        self, result: Tensor, *, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, **others: Any
    ) -> None:
        is_plain = others["size_average"] is None and others["reduce"] is None and not target.is_floating_point()
        if not is_plain or reduction != "mean":
            return
        counts = target != ignore_index
        with torch.no_grad():
            total = counts if weight is None else weight[target.where(counts, 0)] * counts
            self.counts.append((result, total.sum()))
