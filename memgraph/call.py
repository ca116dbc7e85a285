"""A module's call taken apart: the tensors that it reads, each with its role, and all that is left when they are gone.

model(x, labels=y)   ->   parameter w, buffer mean, input 0, input 1  +  a form in which `run` puts other tensors
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .trees import Spec, flatten, tensors_of, unflatten

Args = tuple[Any, ...]  # of a call of the module
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class Input:
    """What a placeholder stands for: a parameter or buffer by its name, an input by its place among the different
    tensors that the call is given, a tangent by the place of its output."""

    kind: Literal["parameter", "buffer", "input", "tangent"]
    name: str = ""
    index: int = -1

    @property
    def label(self) -> str:
        """As an error names it."""
        return f"{self.kind} {self.name or self.index}"


@dataclass(frozen=True)
class Output:
    """What the graph returns at a place: an output, the gradient of the parameter `name` or of the input `index`, or
    this rank's part of what all ranks have of the bucket `index`."""

    kind: Literal["output", "gradient", "input_gradient", "shard"]
    name: str = ""
    index: int = -1


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor in the module's result: an output of the graph, or an input that was handed through, as it is
    or as a view of it."""

    kind: Literal["output", "input"]
    index: int
    view: View | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """What it stands for, of the output or input at its place."""
        return tensor if self.view is None else self.view.on(tensor)


@dataclass(frozen=True)
class View:
    """How a view lies in what it is a view of; autograd knows nothing of it, least of all if it is `detached`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    detached: bool

    @classmethod
    def of(cls, tensor: Tensor, source: Tensor) -> View | None:
        """How a tensor lies in another one; None if it is none of its views, or one that has to be computed."""
        is_seen = tensor.requires_grad and torch.is_grad_enabled()
        if is_seen or tensor.layout != torch.strided or tensor.dtype != source.dtype:
            return None
        if tensor.untyped_storage()._cdata != source.untyped_storage()._cdata or tensor.is_conj() or tensor.is_neg():
            return None
        offset = int(tensor.storage_offset() - source.storage_offset())
        return cls(tuple(tensor.shape), tensor.stride(), offset, tensor._base is not source)

    def on(self, source: Tensor) -> Tensor:
        """The view of the real one."""
        source = source.detach() if self.detached else source
        if (self.shape, self.stride, self.offset) == (source.shape, source.stride(), 0) and self.detached:
            return source
        return source.as_strided(self.shape, self.stride, source.storage_offset() + self.offset)


@dataclass(frozen=True, eq=False)
class Call:
    """What runs, and the real tensors that it reads, in the order of the placeholders."""

    module: nn.Module
    leaves: list[Any]
    spec: Spec
    inputs: tuple[Input, ...]
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, spec = flatten((args, kwargs))
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        given = tensors_of(leaves)
        inputs = (
            *(Input("parameter", name) for name in parameters),
            *(Input("buffer", name) for name in buffers),
            *(Input("input", index=i) for i in range(len(given))),
        )
        return cls(module, leaves, spec, inputs, (*parameters.values(), *buffers.values(), *given))

    def state(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """By name, what stands in the place of parameters and buffers; `values` has a tensor for each input."""
        return {role.name: value for role, value in zip(self.inputs, values, strict=True) if role.kind != "input"}

    def run(self, values: Sequence[Tensor]) -> Any:
        """The result with other tensors in the place of the inputs; parameters and buffers are the module's own."""
        pairs = zip(self.tensors, self.inputs, values, strict=True)
        given = {id(tensor): value for tensor, role, value in pairs if role.kind == "input"}
        leaves = [given[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(leaves, self.spec)
        return self.module(*args, **kwargs)
