"""Tell what a forward returns apart: outputs of the graph, inputs that are passed through, and constants.

return x, y, y, 3    ->   Ref("input", 0), Ref("output", 0), Ref("output", 0), 3
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...errors import CaptureError
from ...graph.captured import Input, Ref, View
from ...graph.tensor_numbers import TensorNumbers, as_tensor
from ...guards.variable_scope import cell_contents
from ...system.user_warning import warn_user
from ...tensors.differentiable import is_differentiable
from ...tensors.traced_number import is_traced


def references(
    leaves: Sequence[Any], roles: Sequence[Input], passed: Mapping[int, Tensor], values: Sequence[Tensor],
    numbers: TensorNumbers,
) -> tuple[list[Any], dict[int, Tensor]]:  # fmt: skip
    """Return references to the leaves of a result, and the tensors that become outputs, by identity.

    Args:
        roles: of the inputs.
        passed: by position, those of the inputs that may be passed through.
        values: all inputs.
        numbers: that forward has read from tensors, and may return.
    """
    inputs = set(map(id, values))
    differentiable = {leaf.untyped_storage()._cdata for leaf in _differentiated(leaves) if id(leaf) not in inputs}
    outputs: dict[int, Tensor] = {}
    refs: list[Any] = []
    for leaf in leaves:
        if is_traced(leaf) and leaf.node.trace is numbers:
            tensor = as_tensor(leaf)
            outputs[id(tensor)] = tensor
            refs.append(Ref("output", len(outputs) - 1, is_number=True))
        elif not isinstance(leaf, Tensor):
            _refuse_lazy(leaf)
            refs.append(leaf)
        elif (ref := _input_ref(leaf, roles, passed, differentiable)) is not None:
            refs.append(ref)
        else:
            outputs.setdefault(id(leaf), leaf)
            refs.append(Ref("output", list(outputs).index(id(leaf))))
    return refs, outputs


def _refuse_lazy(leaf: Any) -> None:
    """
    Raises:
        CaptureError: a result is a function that holds tensors of its call.
    """
    held: list[Any] = [leaf.args, leaf.keywords] if isinstance(leaf, functools.partial) else []
    if isinstance(leaf, MethodType | BuiltinMethodType | MethodWrapperType):
        held = [leaf.__self__]
    if isinstance(leaf, FunctionType):
        held = [content for cell in leaf.__closure__ or () for content in cell_contents(cell)]
    if any(isinstance(each, Tensor) for each in tree_leaves(held)):
        raise CaptureError("forward returns a function that holds tensors of its call: return these tensors")


def _input_ref(
    leaf: Tensor, roles: Sequence[Input], passed: Mapping[int, Tensor], differentiable: Set[int]
) -> Ref | None:
    """Return a reference if a result is an input, or a view of one that autograd does not know.

    `differentiable` are the storages with a result that autograd differentiates.
    """
    for i, value in passed.items():
        # The gradient of a returned parameter leaves the graph summed with its others, and that of an input with
        # those of its views: in the order in which autograd sums them.
        needs_sum = roles[i].kind == "parameter" or value.untyped_storage()._cdata in differentiable
        if leaf is value and not (needs_sum and value.requires_grad and torch.is_grad_enabled()):
            return Ref("input", i)
    views = ((i, View.of(leaf, value)) for i, value in passed.items())
    return next((Ref("input", i, view) for i, view in views if view is not None), None)


def _differentiated(leaves: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that autograd has to differentiate."""
    return [each for each in leaves if isinstance(each, Tensor) and is_differentiable(each) and torch.is_grad_enabled()]


def differentiable(outputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the outputs that autograd differentiates, by their places."""
    return {i: output for i, output in enumerate(outputs) if is_differentiable(output)}


def refuse_results(result: Any) -> None:
    """Raise if forward returns a module, or a dict with tensors as keys."""
    if any(isinstance(key, Tensor) for key in _keys(result)):
        raise CaptureError("forward returns a dict with a tensor as a key: return a list of pairs")
    if (module := next((leaf for leaf in tree_leaves(result) if isinstance(leaf, nn.Module)), None)) is not None:
        raise CaptureError(
            f"forward returns a module, {type(module).__name__}, and a captured step would return a copy of it: "
            "return what is needed"
        )


def _keys(result: Any) -> Iterator[Any]:
    """Yield the keys of dicts in a result, however deep."""
    if isinstance(result, dict):
        yield from result
    if isinstance(result, dict | list | tuple):
        for each in result.values() if isinstance(result, dict) else result:
            yield from _keys(each)


def refuse_made_leaves(stored: Sequence[Any], returned: Sequence[Any], values: Sequence[Tensor]) -> None:
    """Raise if forward stores a tensor that it has made and given `requires_grad_()`: it would have no `.grad`.

    If forward returns it, warn.
    """
    given = set(map(id, values))

    def made(leaves: Sequence[Any]) -> Iterator[Tensor]:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf and id(leaf) not in given:
                yield leaf

    for leaf in made(returned):
        warn_user(
            f"forward returns a tensor of shape {tuple(leaf.shape)} that it has made and called requires_grad_() on: "
            "it is no leaf here, and backward does not set its .grad; make it an argument, or return the gradient"
        )
    for leaf in made(stored):
        raise CaptureError(
            f"forward stores a tensor of shape {tuple(leaf.shape)} in an attribute, which it has made and called "
            "requires_grad_() on: no captured step gives it a gradient; make it an argument or a parameter"
        )
