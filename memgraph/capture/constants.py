"""Tensors that a step reads besides parameters, buffers and arguments.

torch.tensor([1., 2.]) in forward, or a tensor in a plain attribute    ->   a `get_attr` node with a real tensor
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CaptureError
from ..graph.nodes import written_inputs
from ..guards.attribute_snapshot import attached_values

aten = torch.ops.aten
SMALL = 64  # elements of a literal that is compared with others
_literals: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()  # of the graphs that exist


def describe_constants(graph: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Set the fake tensor of each constant of a graph."""
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = getattr(graph, str(node.target))
        if isinstance(constant, FakeTensor):
            raise CaptureError(
                f"a tensor {tuple(constant.shape)} was kept from an earlier trace: create it in forward, in each call"
            )
        if isinstance(constant, Tensor):
            node.meta["val"] = mode.from_tensor(constant)


def drop_unread_constants(graph: fx.GraphModule) -> None:
    """Free the tensors of a graph that no node reads any more."""
    read = {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}
    for name in [name for name, value in vars(graph).items() if isinstance(value, Tensor) and name not in read]:
        delattr(graph, name)
    for name in [name for name, _ in graph.named_buffers(recurse=False) if name not in read]:
        delattr(graph, name)


def share_literals(graph: fx.GraphModule) -> None:
    """Let equal small literals of all graphs be one tensor: graphs that are kept beside each other hold it once.

    A literal is only read by copies, and nothing else refers to it. A tensor in an attribute is not shared: its owner
    may change it.
    """
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, str(node.target))
        if all(user.target is aten.lift_fresh_copy.default for user in node.users) and 0 < value.numel() <= SMALL:
            content = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            key = (value.dtype, value.device, value.shape, value.stride(), content)
            setattr(graph, str(node.target), _literals.setdefault(key, value))


def real_tensors(tracer: Any) -> list[Tensor]:
    """Return the tensors that a traced graph holds."""
    root: nn.Module = tracer.root
    return [value for value in (*root.parameters(), *vars(root).values()) if isinstance(value, Tensor)]


@contextmanager
def own_gradients(module: nn.Module, read: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
    """Take back what a block that is traced puts into the `.grad` of real tensors, and raise.

    Those are what the block has `read`, and the tensors of the module.
    """
    try:
        yield
    finally:
        attached = (value for part in module.modules() for _, value in attached_values(part))
        tensors = (tensor for tensor in (*read(), *attached) if isinstance(tensor, Tensor) and tensor.is_leaf)
        changed = [tensor for tensor in tensors if isinstance(tensor.grad, FakeTensor)]
        for tensor in changed:
            tensor.grad = None
        if changed:
            raise _untrained(changed[0], module)


@contextmanager
def own_memory(module: nn.Module) -> Iterator[None]:
    """Take back what a block that is traced sets as `.data` of the module's real tensors, and raise."""
    attached = (value for part in module.modules() for _, value in attached_values(part))
    with _disable_current_modes():
        before = [(each, each.detach()) for each in attached if type(each) is Tensor and each.layout == torch.strided]
    try:
        yield
    finally:
        pairs = [(each, was, each.untyped_storage()._cdata == was.untyped_storage()._cdata) for each, was in before]
        changed = [(each, was) for each, was, is_same in pairs if not is_same]
        with _disable_current_modes():
            for each, was in changed:
                each.data = was
        if changed:
            raise CaptureError(
                f"forward sets .data of {_name(changed[0][0], module)}, as no captured step can: assign a new tensor"
            )


def refuse_trained_constants(trained: list[Tensor], module: nn.Module) -> None:
    """Raise if backward computes gradients of tensors that are no inputs, where a user could read them.

    A tensor that forward makes and then gives `requires_grad_()`, as PEFT's and transformers'
    `enable_input_require_grads` do, is dropped with the step, so it needs no gradient.
    """
    for tensor in trained:
        if not isinstance(tensor, FakeTensor):
            raise _untrained(tensor, module)
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            raise CaptureError(
                f"forward makes a tensor of shape {tuple(tensor.shape)}, calls requires_grad_() on it and gives it a "
                "hook, which no captured step would call: return the tensor, and hook the output of the module"
            )


def refuse_changed_constants(graph: fx.GraphModule, module: nn.Module) -> None:
    """Raise if an op writes to a constant, which a functional graph can't do."""
    constants = {
        node.meta["val"].untyped_storage()._cdata: getattr(graph, str(node.target))
        for node in graph.graph.find_nodes(op="get_attr")
        if "val" in node.meta
    }
    for node in graph.graph.nodes:
        for written in written_inputs(node):
            constant = constants.get(written.meta["val"].untyped_storage()._cdata)
            if constant is not None:
                raise CaptureError(
                    f"forward changes {_name(constant, module)} in place, which is no buffer: register it as one"
                )


def _untrained(tensor: Tensor, module: nn.Module) -> CaptureError:
    name = _name(tensor, module)
    for path, parameter in module.named_parameters():
        if parameter is tensor:
            return CaptureError(
                f"forward reads the parameter {path} by a list or an object that has it too, or by a view that was "
                "made before, where the tensor that stands for it in a trace is not found: read it as the attribute "
                "that it is, or as an nn.ParameterList"
            )
    return CaptureError(
        f"{name} requires a gradient but is no parameter of the module: register it as one (modules in a list go into "
        "an nn.ModuleList), or give it as an argument if it is the result of an op; a flat parameter, as "
        "FullyShardedDataParallel puts there, can't be captured"
    )


def _name(tensor: Tensor, module: nn.Module) -> str:
    for path, child in module.named_modules():
        for name, value in attached_values(child):
            if value is tensor:
                return f"the tensor {'.'.join(filter(None, (path, name)))}"
    return f"a tensor of shape {tuple(tensor.shape)}"
