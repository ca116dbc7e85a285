"""The tensors that a part reads: parameters and buffers of its submodule, and those among its arguments.

layer(x, mask=None)   ->   Inputs({"weight": 0, "bias": 1}, ...), [weight, bias, x]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ..errors import CaptureError
from ..tensors.pytree import Spec, flatten
from ..tensors.traced_number import ValueNeededError, is_traced

PLAIN = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)


class Place(NamedTuple):
    """A tensor of a call: an input of the op, by its position, or a result of forward."""

    kind: str
    position: int


@dataclass(frozen=True)
class Inputs:
    """The inputs of the op, by position: parameters and buffers of the submodule by name, and arguments.

    `trained` are the positions that require a gradient, `written` the buffers that forward changes.
    """

    names: Mapping[str, int]
    parameters: frozenset[int]
    leaves: tuple[Any, ...]
    spec: Spec
    trained: frozenset[int]
    written: tuple[int, ...] = ()

    def label(self, place: int) -> str:
        """Return an input's name in a message."""
        return next((name for name, other in self.names.items() if other == place), "an argument")


def inputs_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Inputs, list[Tensor]]:
    """Return what a call reads, and these tensors by position.

    Raises:
        CaptureError: it reads none, or what is no dense tensor.
        ValueNeededError: a float among the arguments is to be an input of the graph.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    own = parameters | dict(module.named_buffers(remove_duplicate=False))
    leaves, spec = flatten((args, kwargs))
    tensors = list({id(x): x for x in (*own.values(), *leaves) if isinstance(x, Tensor)}.values())
    _refuse_unsuitable(tensors, leaves)
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    grad = torch.is_grad_enabled()
    inputs = Inputs(
        {name: places[id(tensor)] for name, tensor in own.items()},
        frozenset(places[id(tensor)] for tensor in parameters.values()),
        tuple(Place("input", places[id(leaf)]) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        spec,
        frozenset(place for place, tensor in enumerate(tensors) if grad and tensor.requires_grad),
    )
    return inputs, tensors


def as_leaves(inputs: Inputs, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors as leaves of a new autograd graph; buffers that forward writes are copied."""
    leaves = [tensor.detach() for tensor in tensors]
    for place in inputs.written:
        leaves[place] = leaves[place].clone(memory_format=torch.preserve_format)
    for place in inputs.parameters:
        leaves[place] = nn.Parameter(leaves[place], place in inputs.trained)
    for place in inputs.trained:
        leaves[place].requires_grad_()
    return leaves


def described(leaves: Sequence[Any]) -> list[object]:
    """Return leaves so that equal ones compare as equal: NaN, and -0.0."""
    return [(type(leaf), leaf if isinstance(leaf, Place) else repr(leaf)) for leaf in leaves]


def _refuse_unsuitable(tensors: Sequence[Tensor], leaves: Sequence[Any]) -> None:
    if any(map(is_traced, leaves)):
        raise ValueNeededError("a part that runs as it is takes it")
    if not tensors:
        raise CaptureError("it reads no tensor: it has neither parameters, buffers nor tensors among its arguments")
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
            raise CaptureError(
                f"it reads a {tensor.layout} {type(tensor).__name__}, and an op reads dense tensors only"
            )
        if type(tensor) not in PLAIN and vars(tensor):
            raise CaptureError(
                f"it reads a {type(tensor).__module__}.{type(tensor).__name__} with attributes of its own, which "
                "another tensor in its place has not"
            )
        if tensor.device != tensors[0].device:
            raise CaptureError(f"it reads tensors on {tensors[0].device} and on {tensor.device}")
