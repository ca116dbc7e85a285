"""A module's call, taken apart into the tensors that it reads and the rest.

model(x, labels=y)   ->   parameter w, buffer mean, input 0, input 1  +  a form that `run` fills with other tensors
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ...graph.captured import Input
from ...guards.written_attributes import Attribute, call_leaves, written_attributes
from ...tensors.pytree import Spec, tensors_of, unflatten
from .changed_arguments import ArgumentSnapshot
from .kept_by_hooks import HookSnapshot


@dataclass(frozen=True, eq=False)
class Call:
    """A module, and the real tensors that its call reads, in the order of the placeholders."""

    module: nn.Module
    leaves: list[Any]
    spec: Spec
    inputs: tuple[Input, ...]
    tensors: tuple[Tensor, ...]
    held: tuple[Attribute, ...] = ()

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        held = tuple(written_attributes(module).held)
        leaves, spec = call_leaves(args, kwargs, held)
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        given = tensors_of(leaves)
        inputs = (
            *(Input("parameter", name) for name in parameters),
            *(Input("buffer", name) for name in buffers),
            *_arguments(given),
        )
        return cls(module, leaves, spec, inputs, (*parameters.values(), *buffers.values(), *given), held)

    def holding(self, attributes: Iterable[Attribute]) -> Call:
        """Return the call with the present tensors of more attributes among its arguments."""
        args, kwargs, *_ = unflatten(self.leaves, self.spec)
        held = tuple(dict.fromkeys((*self.held, *attributes)))
        leaves, spec = call_leaves(args, kwargs, held)
        given = tensors_of(leaves)
        inputs = *(role for role in self.inputs if role.kind != "input"), *_arguments(given)
        owned = self.tensors[: len(inputs) - len(given)]
        return replace(self, leaves=leaves, spec=spec, inputs=inputs, tensors=(*owned, *given), held=held)

    def state(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Map names of parameters and buffers to their `values`, which has a tensor for each input."""
        return {role.name: value for role, value in zip(self.inputs, values, strict=True) if role.kind != "input"}

    def run(self, values: Sequence[Tensor]) -> Any:
        """Return the result for other inputs. Parameters and buffers are the module's own.

        Raises:
            CaptureError: forward puts something into an argument, or a hook keeps a tensor.
        """
        args, kwargs, *_ = self._filled(values)
        arguments, hooks = ArgumentSnapshot(self.module, args, kwargs), HookSnapshot(self.module)
        with hooks:
            result = self.module(*args, **kwargs)
        arguments.refuse_changes()
        return result

    def fill_held(self, values: Sequence[Tensor]) -> None:
        """Put other tensors into the attributes that are held."""
        _, _, *held = self._filled(values)
        for attribute, value in zip(self.held, held, strict=True):
            attribute.fill(value)

    def _filled(self, values: Sequence[Tensor]) -> Any:
        pairs = zip(self.tensors, self.inputs, values, strict=True)
        given = {id(tensor): value for tensor, role, value in pairs if role.kind == "input"}
        return unflatten([given[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec)


def _arguments(given: Sequence[Tensor]) -> tuple[Input, ...]:
    return tuple(Input("input", index=i) for i in range(len(given)))
