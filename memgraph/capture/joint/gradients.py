"""Gradients in a trace: the tangents with which backward begins, their roles, and the outputs that they come from."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses import FakeTensor
from torch.autograd.graph import GradientEdge
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

from ...errors import CaptureError
from ...graph.captured import Input, Output
from ...graph.gradient_sums import ADD_ARRIVAL
from ...guards.read_objects import refuse_set_attributes
from ...system.entered_code import is_watched
from ...system.frames import TORCH
from ...tensors.loss_outputs import reachable_nodes
from ..call.set_gradients import set_gradient_error
from ..fake_tensors import without_autocast

GRAD: Any = inspect.getattr_static(Tensor, "grad")  # torch's own


def insert_tangent(output: Tensor, index: int, tracer: Any) -> Tensor:
    """Insert a placeholder for the gradient of an output: dense, with the output's order of dimensions."""
    with disable_proxy_modes_tracing():
        tangent = torch.empty_like(output.detach())
    with tracer.graph.inserting_after(tracer.graph.find_nodes(op="placeholder")[-1]):
        proxy = tracer.create_proxy("placeholder", f"tangent_{index}", (), {})
    track_tensor_tree(tangent, proxy, constant=None, tracer=tracer)
    return tangent


def gradient_role(role: Input) -> Output:
    """Return the role of the gradient of an input."""
    return Output("gradient", role.name) if role.kind == "parameter" else Output("input_gradient", index=role.index)


def differentiate(
    roots: Sequence[Tensor], leaves: Sequence[Any], tangents: Sequence[Tensor], values: Sequence[Tensor],
    runs_python: bool,
) -> Sequence[Tensor | None]:  # fmt: skip
    """Return the gradients of the leaves for these tangents of the roots; `values` are the inputs of the step.

    If backward `runs_python` of the user's, it may ask whether it runs in `backward()`, and call that itself.
    """
    with without_autocast(values):
        if not runs_python:
            return torch.autograd.grad(roots, leaves, tangents, allow_unused=True)
        arrivals = _Arrivals()
        with arrivals.watching(leaves):
            torch.autograd.backward(roots, tangents)
    return [arrivals.totals.get(place) for place in range(len(leaves))]


class _Arrivals:
    """The gradients of leaves, summed in the order in which they arrive.

    A function's backward that calls `backward()` adds to `.grad` before or after the rest of a gradient arrives.
    """

    def __init__(self) -> None:
        self.totals: dict[int, Tensor] = {}  # by the leaf's place
        self._latest: dict[int, Tensor] = {}  # without the copy that autograd may put into `.grad`

    @contextmanager
    def watching(self, leaves: Sequence[Tensor | GradientEdge]) -> Iterator[None]:
        """Take in all gradients of leaves that arrive in this block, and leave their `.grad` empty."""
        with ExitStack() as stack:
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, GradientEdge):
                    stack.callback(leaf.node.register_prehook(partial(self._reach, place, leaf.output_nr)).remove)
                else:
                    stack.callback(leaf.register_hook(partial(self._latest.__setitem__, place)).remove)
                    stack.callback(leaf.register_post_accumulate_grad_hook(partial(self._accumulate, place)).remove)
            yield

    def _reach(self, place: int, output: int, gradients: Sequence[Tensor | None]) -> None:
        if (gradient := gradients[output]) is not None:
            self._add(place, gradient)

    def _accumulate(self, place: int, leaf: Tensor) -> None:
        leaf.grad = None
        self._add(place, self._latest.pop(place))

    def _add(self, place: int, gradient: Tensor) -> None:
        total = self.totals.get(place)
        self.totals[place] = gradient if total is None else ADD_ARRIVAL(total, gradient)


def refuse_sparse(gradients: Mapping[Input, Tensor]) -> None:
    """Raise if a gradient is not dense."""
    for role, gradient in gradients.items():
        if gradient.layout != torch.strided:
            raise CaptureError(f"the gradient of {role.label} is {gradient.layout}: use sparse=False")


@contextmanager
def refuse_read_gradients(roles: Sequence[Input], values: Sequence[Tensor]) -> Iterator[None]:
    """Raise if the block reads or sets the `.grad` of one of the step's inputs, or of a tensor elsewhere."""
    inputs, thread, errors = {id(v): role for role, v in zip(roles, values, strict=False)}, get_ident(), []

    def read(tensor: Tensor) -> Any:
        role, gradient, frame = inputs.get(id(tensor)), _grad(tensor), sys._getframe(1)
        is_traced = active_fake_mode() is not None and not isinstance(tensor, FakeTensor)
        is_elsewhere = is_traced and (tensor.requires_grad or gradient is not None)
        is_asked = not _is_described(frame) if role else is_elsewhere and is_watched(frame.f_code.co_filename)
        if is_asked and get_ident() == thread:
            label = role.label if role else "a tensor that is no parameter of the module"
            errors.append(
                CaptureError(
                    f"forward, or a function's backward, reads the .grad of {label}, which "
                    "is no input of the step: give it as an argument, or keep what is needed of it in a buffer"
                )
            )
            raise errors[-1]
        return gradient

    def write(tensor: Tensor, gradient: Tensor | None) -> None:
        if get_ident() == thread and is_watched(sys._getframe(1).f_code.co_filename):
            role = inputs.get(id(tensor))
            if role is not None or (active_fake_mode() is not None and not isinstance(tensor, FakeTensor)):
                label = role.label if role else "a tensor that is no parameter of the module"
                errors.append(set_gradient_error(label, "forward or a function's backward"))
                if role is None:
                    raise errors[-1]
        GRAD.__set__(tensor, gradient)

    with mock.patch.object(Tensor, "grad", property(read, write, GRAD.__delete__), create=True):
        yield
    if errors:
        raise errors[0]  # it was caught


def _is_described(frame: FrameType) -> bool:
    """Return True if torch reads a tensor in order to make a fake one of it."""
    return frame.f_code.co_filename.startswith(os.path.join(TORCH, "_subclasses", ""))


def _grad(tensor: Tensor) -> Tensor | None:
    with torch._C.DisableTorchFunction():  # or the trace's mode would ask for the property again
        found: Tensor | None = GRAD.__get__(tensor)
    return found


def refuse_set_gradients(roles: Sequence[Input], values: Sequence[Tensor], where: str) -> None:
    """Raise if the trace has left a gradient, or an attribute, in one of its inputs."""
    refuse_set_attributes(values)
    for role, value in zip(roles, values, strict=False):
        if value.is_leaf and _grad(value) is not None:
            raise set_gradient_error(role.label, where)


def refuse_lost(trained: set[int], roles: Sequence[Input], values: Sequence[Tensor], made: Sequence[Output]) -> None:
    """Raise if a function's backward runs a block again whose parameters get no gradient."""
    for role, value in zip(roles, values, strict=False):
        if id(value) in trained and gradient_role(role) not in made:
            raise CaptureError(
                f"the backward of an autograd.Function runs a block again that reads {role.label}, which gets no "
                "gradient: use torch.utils.checkpoint in place of the Function"
            )


def gradient_sources(
    outputs: Sequence[Tensor], roots: Sequence[int], leaves: Mapping[Output, Tensor | GradientEdge]
) -> dict[Output, frozenset[int]]:
    """Map each leaf to the outputs from which backward reaches it."""
    if len(roots) == 1:
        return dict.fromkeys(leaves, frozenset(roots))
    reached = {}
    for i in roots:
        nodes = reachable_nodes([outputs[i].grad_fn])
        reached[i] = {outputs[i], *nodes, *(getattr(node, "variable", None) for node in nodes)}
    ends = {role: leaf.node if isinstance(leaf, GradientEdge) else leaf for role, leaf in leaves.items()}
    return {role: frozenset(i for i in roots if end in reached[i]) or frozenset(roots) for role, end in ends.items()}
