"""The results of a part, apart from the numbers: structure, constants, layouts, and what gradients reach.

return {"y": y, "n": 3}, x   ->   Results((Place("output", 0), 3, Place("input", 2)), ...), [y]

Facts of the autograd graph of a part's call.

    y = w * x + x    ->   the gradient of y reaches w once and x twice

Autograd adds the gradients of a tensor in the order in which it meets them. An op returns one sum for each tensor, so
the order is eager's only if no other gradient of that tensor comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CaptureError
from ..graph.result_layout import Layout, layout
from ..tensors.loss_outputs import reachable_nodes
from ..tensors.pytree import Spec, flatten, unflatten
from .inputs import Place, described


@dataclass(frozen=True)
class Results:
    """The results of a recorded call, with a `Place` for each tensor.

    `layouts` are those of its distinct new tensors. `reached` are the inputs that a gradient of each reaches, and
    `counts` how many gradients of each input are added up.
    """

    leaves: tuple[Any, ...]
    spec: Spec
    layouts: tuple[Layout, ...]
    reached: tuple[frozenset[int], ...]
    counts: Mapping[int, int]

    @property
    def form(self) -> int:
        """A number that is equal for results that differ in numbers only, in all processes."""
        objects = [shell.blob for shell in self.spec.shells if shell is not None]
        reached = [sorted(places) for places in self.reached]
        text = repr((described(self.leaves), str(self.spec.tree), objects, self.layouts, reached))
        return int.from_bytes(blake2b(text.encode(), digest_size=7).digest())

    def filled(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """Return the structure with these tensors."""
        tensors = {"output": outputs, "input": inputs}
        leaves = [tensors[leaf.kind][leaf.position] if isinstance(leaf, Place) else leaf for leaf in self.leaves]
        return unflatten(leaves, self.spec)


def results_of(result: Any, leaves: Sequence[Tensor]) -> tuple[Results, list[Tensor]]:
    """Return what a call returned, and its distinct new tensors.

    Raises:
        CaptureError: a result shares memory with an input or another result, or a gradient reaches an unknown tensor.
    """
    flat, spec = flatten(result)
    inputs = {id(leaf): place for place, leaf in enumerate(leaves)}
    outputs: dict[int, Tensor] = {}
    found: list[Any] = []
    for leaf in flat:
        if not isinstance(leaf, Tensor):
            found.append(leaf)
        elif id(leaf) in inputs:
            found.append(Place("input", inputs[id(leaf)]))
        else:
            outputs.setdefault(id(leaf), leaf)
            found.append(Place("output", list(outputs).index(id(leaf))))
    new = list(outputs.values())
    _refuse_shared(new, leaves)
    reached = tuple(reached_leaves(output, inputs) for output in new)
    if any(-1 in places for places in reached):
        raise CaptureError("a gradient reaches a parameter that is neither its own nor one of its arguments")
    results = Results(tuple(found), spec, tuple(map(layout, new)), reached, gradient_counts(new, inputs))
    return results, new


def _refuse_shared(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    storages = {leaf.untyped_storage()._cdata for leaf in leaves}
    for output in outputs:
        if output.layout != torch.strided or type(output) not in (Tensor, nn.Parameter):
            raise CaptureError(
                f"it returns a {output.layout} {type(output).__name__}, and an op makes dense tensors only"
            )
        if output.device != leaves[0].device:
            raise CaptureError(f"it reads tensors on {leaves[0].device}, and returns one on {output.device}")
        storage = output.untyped_storage()._cdata
        if storage in storages:
            raise CaptureError("a result is a view of an argument, a parameter or another result, as no op's may be")
        storages.add(storage)


def reached_leaves(output: Tensor, positions: Mapping[int, int]) -> frozenset[int]:
    """Return the positions of the leaves that the gradient of an output reaches; -1 for any other leaf.

    `positions` maps ids of leaves to their positions.
    """
    if not output.requires_grad:
        return frozenset()
    if output.grad_fn is None:
        return frozenset((positions.get(id(output), -1),))
    variables = [getattr(node, "variable", None) for node in reachable_nodes([output.grad_fn])]
    return frozenset(positions.get(id(variable), -1) for variable in variables if variable is not None)


def gradient_counts(outputs: Sequence[Tensor], positions: Mapping[int, int]) -> dict[int, int]:
    """Return how many gradients autograd adds up for each leaf, by its position."""
    counts: Counter[int] = Counter()
    for node in reachable_nodes([output.grad_fn for output in outputs]):
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)
            if variable is not None:
                counts[positions.get(id(variable), -1)] += 1
    return dict(counts)
