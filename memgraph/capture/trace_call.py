"""Trace a call once, and make the graph of its step.

call   ->   first trace   ->   functional graph   ->   final graph   ->   Captured

Refuse a trace that has left a tensor of its own somewhere: no step puts one there, and this one has no numbers.

    EVENTS[-1].scalars["loss"] = loss.detach()      a CaptureError that names the entry 'loss' of a dict

Whatever holds it, nothing of a trace is alive once the trace has ended.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import CellType, FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import CaptureError
from ..graph.aten_shims import copy_only_inputs
from ..graph.captured import Captured
from ..graph.gradient_sums import sum_grads_early
from ..opaque.recorder import Recorder
from ..system.own_attributes import attributes_of
from ..tensors.loss_outputs import OutputSelector
from .call.call import Call
from .constant_fake_mode import ConstantFakeMode
from .explain_errors import explain_error
from .fake_tensors import fake_mode_context
from .finalize import assemble, finalize_graph, with_floats, with_guards
from .floats.float_inputs import FloatInputs
from .functionalize import functionalize
from .joint.trace_joint import trace_joint
from .python_state.refuse_reseeding import refuse_reseeding
from .python_state.refused_draws import refuse_python_random
from .sizes.size_inputs import SizeInputs, name_sizes
from .values.value_run import ValueRun

HOLDERS = 5  # of a tensor that is left, one in the other, that are named


@dataclass(frozen=True, eq=False)
class Request:
    """A call to capture; its floats and sizes that are no constants; `grad` to capture backward as well."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    floats: FloatInputs | None
    sizes: SizeInputs | None

    def call(self) -> Call:
        """Return the call, taken apart."""
        return Call.of(self.module, self.args, self.kwargs)


def trace_call(
    request: Request, wanted: OutputSelector, values: ValueRun | None, recorder: Recorder | None,
    has_numbers: bool = False,
) -> Captured:  # fmt: skip
    """Trace a call, with the values and the calls of opaque submodules that a real run has recorded.

    With `has_numbers`, stand-ins take the place of the numbers among these values.
    """
    call, floats, sizes = request.call(), request.floats, request.sizes
    module = call.module
    if floats is not None:
        call = replace(call, leaves=floats.in_leaves(call.leaves))
    grad = request.grad and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
    answers = values.answers if values is not None else None
    mode = ConstantFakeMode(floats is not None, answers, has_numbers, sizes)
    with (
        fake_mode_context(mode),
        refuse_python_random(module),
        torch.set_grad_enabled(grad),
        explain_error(module, mode),
    ):
        with refuse_reseeding(module), floats.in_attributes() if floats is not None else nullcontext():
            joint = trace_joint(call, mode, wanted, recorder)
        refuse_left_tensors(mode.traced)
        functional = functionalize(joint, call)
        copy_only_inputs(functional.graph.graph, mode)
        graph = finalize_graph(functional, joint)
        sum_grads_early(graph.graph)
        if sizes is not None:
            name_sizes(graph.graph)
    captured = assemble(joint, graph, wanted)
    if values is not None or recorder is not None:
        captured = with_guards(captured, values, recorder, call.tensors)
    return captured if floats is None else with_floats(captured, floats)


def refuse_left_tensors(traced: Iterable[Iterable[Tensor]]) -> None:
    """
    Args:
        traced: the tensors of each trace, which these hold weakly.

    Raises:
        CaptureError: one of them is alive.
    """
    traces = [*traced]
    if not any(True for tensors in traces for _ in tensors):
        return
    gc.collect()  # an error that forward has caught, for one, is a cycle with its frames
    alive = [tensor for tensors in traces for tensor in tensors]
    for number in range(len(alive)):
        if holders := _holders(alive, number):
            raise CaptureError(
                f"forward leaves a tensor in {', of '.join(holders)}, where no captured step puts one: return it, or "
                "store it in an attribute of the module, or of an object or a container in one"
            )


def _holders(tensors: list[Tensor], number: int) -> list[str]:
    """Return what holds one of these tensors beside this list, and what holds that, up to an object with a name for it.

    Empty for torch's own, such as autocast's cache.
    """
    found, thing = list[str](), cast(Any, tensors[number])
    own: list[Any] = [tensors]
    own.append(own)
    while len(found) < HOLDERS:
        referrers = gc.get_referrers(thing)
        own += [thing, referrers]
        others = [each for each in referrers if not isinstance(each, FrameType) and all(each is not one for one in own)]
        if not others:
            break
        holder = others[0]
        own.append(others)
        if isinstance(holder, CellType):
            return [*found, "a variable of an enclosing function"]
        named: Any = vars(holder) if isinstance(holder, type) else attributes_of(holder) or {}
        if isinstance(holder, dict):
            named, holder = holder, _owner(holder)
        name = _name(named, thing)
        found.append(_kind(holder) if name is None else f"the {_word(holder, named)} {name!r} of {_kind(holder)}")
        if name is not None and holder is not named and not isinstance(holder, logging.LogRecord):
            break
        thing = holder
    return found


def _owner(attributes: dict[Any, Any]) -> Any:
    """Return the object that has a dict as its attributes; the dict itself, if there is no such object."""
    for each in gc.get_referrers(attributes):
        if attributes_of(each) is attributes:
            return each
    return attributes


def _name(named: Mapping[Any, Any], thing: object) -> Any:
    for name, value in named.items():
        if value is thing:
            return name
    return None


def _word(holder: object, named: object) -> str:
    return "entry" if holder is named else "attribute"


def _kind(holder: object) -> str:
    name = type(holder).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
