"""A module and the arguments of one call -> the graph of a whole step.

    model(x, labels=y)   ->   parameters, buffers, x, y, tangents -> forward ops, backward ops -> outputs, gradients

The call is traced on fake tensors, forward and backward at once, then made functional, then put in order.  Everything
that is not a tensor is written into the graph as it was in this call: a caller that reuses a graph must compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import CaptureError
from ..graph.aten_shims import copy_only_inputs
from ..graph.captured import Captured, Input, Output, Ref
from ..graph.nodes import returned
from ..graph.sums import sum_early
from ..tensors.loss_outputs import Wanted, everything, losses, scalars
from .call import Call
from .constant_fake_mode import KnowingMode
from .explain_errors import explained
from .fake_tensors import surroundings
from .finalize import settle
from .functionalize import make_functional
from .reentrant_forward import can_run_again
from .refuse_reseeding import no_seeding
from .trace_joint import trace_joint

__all__ = ["Captured", "Input", "Output", "Ref", "Wanted", "capture", "everything", "losses", "operands", "scalars"]


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    grad: bool = True,
    wanted: Wanted = everything,
) -> Captured:
    """The step of `module(*args, **kwargs)`; no real tensor is read or written.

    With `grad` it includes the backward from those differentiable outputs that are `wanted`; or from all, where these
    are a guess, and a forward that is run again for the others would make other values of them.
    """
    captured = _captured(module, args, kwargs, grad, wanted)
    is_sure = len(captured.tangents) == len(captured.differentiable) and not captured.hoped
    if is_sure or wanted not in (losses, scalars) or can_run_again(captured):
        return captured
    return _captured(module, args, kwargs, grad, everything)


def _captured(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, wanted: Wanted) -> Captured:
    call = Call.of(module, args, kwargs)
    grad = grad and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
    mode = KnowingMode()
    with surroundings(mode), torch.set_grad_enabled(grad), explained(module, mode):
        with no_seeding(module):
            joint = trace_joint(call, mode, wanted)
        functional = make_functional(joint, module)
        copy_only_inputs(functional.graph.graph, mode)
        _refuse_shared(call, functional.changed)
        graph = settle(functional, joint)
        sum_early(graph.graph)
    tangents = tuple(role.index for role in joint.inputs if role.kind == "tangent")
    found = joint.inputs, joint.outputs, joint.leaves, joint.spec, joint.differentiable, tangents
    hoped = _hoped(graph, tangents) if wanted is losses else ()
    return Captured(graph, *found, hoped, sources=joint.sources, custom=joint.custom, rewritten=joint.rewritten)


def operands(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The real tensors for the placeholders of a captured call, without the tangents."""
    return Call.of(module, args, kwargs).tensors


def _hoped(graph: fx.GraphModule, tangents: Sequence[int]) -> tuple[int, ...]:
    made = returned(graph.graph)
    single = {place for place in tangents if made[place].meta["val"].numel() == 1}
    return tuple(place for place in tangents if place not in single) if single else ()


def _refuse_shared(call: Call, changed: dict[int, fx.Node]) -> None:
    """What forward changes must have no second name: the graph would not see the change under it."""
    storages = [tensor.untyped_storage()._cdata for tensor in call.tensors]
    for i in changed:
        for j, role in enumerate(call.inputs):
            if i != j and storages[i] == storages[j]:
                names = f"{call.inputs[i].label} in place, which shares its memory with {role.label}"
                raise CaptureError(f"forward changes {names}: clone one of them")
