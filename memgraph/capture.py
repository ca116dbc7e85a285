"""A module and the arguments of one call -> the graph of a whole step.

    model(x, labels=y)   ->   parameters, buffers, x, y, tangents -> forward ops, backward ops -> outputs, gradients

The call is traced on fake tensors, forward and backward at once, then made functional, then put in order.  Everything
that is not a tensor is written into the graph as it was in this call: a caller that reuses a graph must compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from .call import Call, Input, Output, Ref
from .errors import CaptureError
from .fakes import surroundings
from .float_inputs import FloatNode, Floats, Place, Special, float_inputs
from .functional import make_functional
from .joint import trace_joint
from .known import KnowingMode
from .nodes import returned
from .overwritten import can_run_again
from .refusal import explained
from .seeding import no_seeding
from .settle import settle
from .sums import sum_early
from .surrogates import copy_only_inputs
from .trees import Spec, unflatten
from .wanted import Wanted, everything, losses, scalars

__all__ = ["Captured", "Input", "Output", "Ref", "Wanted", "capture", "everything", "losses", "operands", "scalars"]


@dataclass(frozen=True, eq=False)
class Captured:
    """A step.  The graph's placeholders are `inputs`, it returns `outputs`, and its nodes bear `val`, `phase`, `where`.

    `leaves` and `spec` are the module's result; a `Ref` stands for each of its tensors.  `differentiable` are the
    outputs that require a gradient in eager, `tangents` those of them that backward starts from.  Of these `hoped` are
    those beside the scalars: whether a loss is made of them is yet to be seen.  `updates` names the parameters that
    backward updates by itself, `exchanged` those whose gradients it averages over ranks, `gathers` the buckets of which
    forward gathers what other ranks have updated, `sources` the outputs that each gradient comes from; `rewritten` says
    of inputs that forward changes in place, and that autograd follows, which output has their new value.  `custom` is
    whether an output was made by an autograd.Function of Python's, which may hold what no graph shows.  `floats` are
    what ops read of the Python floats that each call gives anew, `opened` the values that these had, `special` the
    values at which the graph would be another.
    """

    graph: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    leaves: tuple[Any, ...]
    spec: Spec
    differentiable: tuple[int, ...]
    tangents: tuple[int, ...]
    hoped: tuple[int, ...] = ()
    updates: tuple[str, ...] = ()
    sources: Mapping[Output, frozenset[int]] = field(default_factory=dict)
    exchanged: tuple[str, ...] = ()
    gathers: frozenset[int] = frozenset()
    custom: bool = False
    rewritten: Mapping[int, int] = field(default_factory=dict)
    floats: tuple[FloatNode, ...] = ()
    opened: Mapping[Place, float] = field(default_factory=dict)
    special: tuple[Special, ...] = ()

    def result(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """What the module returns, of what the graph returned and of the real tensors that it read."""
        tensors = {"output": outputs, "input": inputs}
        found: dict[Ref, Tensor] = {}  # a tensor that is returned twice is one
        for leaf in self.leaves:
            if isinstance(leaf, Ref) and leaf not in found:
                found[leaf] = leaf.of(tensors[leaf.kind][leaf.index])
        return unflatten([found[leaf] if isinstance(leaf, Ref) else leaf for leaf in self.leaves], self.spec)


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    grad: bool = True,
    wanted: Wanted = everything,
    floats: Floats | None = None,
) -> Captured:
    """The step of `module(*args, **kwargs)`; no real tensor is read or written.

    With `grad` it includes the backward from those differentiable outputs that are `wanted`; or from all, where these
    are a guess, and a forward that is run again for the others would make other values of them.  `floats` of the call
    are inputs of the graph, and no constants.

    Raises:
        ValueNeededError: one of the `floats` is looked at while forward or backward is traced.
    """
    captured = _captured(module, args, kwargs, grad, wanted, floats)
    is_sure = len(captured.tangents) == len(captured.differentiable) and not captured.hoped
    if is_sure or wanted not in (losses, scalars) or can_run_again(captured):
        return captured
    return _captured(module, args, kwargs, grad, everything, floats)


def _captured(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, wanted: Wanted,
    floats: Floats | None,
) -> Captured:  # fmt: skip
    call = Call.of(module, args, kwargs)
    if floats is not None:
        call = replace(call, leaves=floats.in_leaves(call.leaves))
    grad = grad and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
    mode = KnowingMode(has_floats=floats is not None)
    with surroundings(mode), torch.set_grad_enabled(grad), explained(module, mode):
        with no_seeding(module), floats.in_attributes() if floats is not None else nullcontext():
            joint = trace_joint(call, mode, wanted)
        functional = make_functional(joint, module)
        copy_only_inputs(functional.graph.graph, mode)
        _refuse_shared(call, functional.changed)
        graph = settle(functional, joint)
        sum_early(graph.graph)
    tangents = tuple(role.index for role in joint.inputs if role.kind == "tangent")
    found = joint.inputs, joint.outputs, joint.leaves, joint.spec, joint.differentiable, tangents
    hoped = _hoped(graph, tangents) if wanted is losses else ()
    captured = Captured(graph, *found, hoped, sources=joint.sources, custom=joint.custom, rewritten=joint.rewritten)
    if floats is None:
        return captured
    return replace(captured, floats=float_inputs(graph.graph), special=tuple(floats.notes.special))


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
