"""What torch says when a step can't be traced -> a `CaptureError` that says where, and what to change.

Only what comes from tracing is translated; an error of the user's own forward stays what it is.  Where an op fails on
fake tensors, it is run on real ones: if it fails there as well, as shapes that don't fit do, eager would have said so,
and only the place is added.  Torch's log of what fake tensors see is kept quiet.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules.batchnorm import _NormBase

from ..errors import CaptureError
from ..system.frames import is_torchs, is_users, module_running, source_line
from ..tensors.pytree import flatten
from .constant_fake_mode import ConstantFakeMode

VALUE = (
    "Python asks for a tensor's value (`if`, `while`, `.item()`, `int()`), which no input's value may decide",
    "compute with torch.where or a mask, decide by shapes and Python arguments, or do this outside of the module",
)
SHAPE = (
    "the shape of a result depends on a tensor's values (`nonzero`, `unique`, a boolean index)",
    "use a mask, torch.where, or a result of fixed size",
)
NO_FAKE = (
    "an op can't be run without data: nothing says what it would make",
    "register a fake implementation for it with torch.library.register_fake, which makes an empty tensor of the shape, "
    "dtype and strides of its result; a function that is no op of torch yet becomes one by torch.library.custom_op",
)
NUMPY = (
    "a tensor becomes a numpy array, and a captured step is made of torch's ops alone",
    "compute with torch's ops; or make an op of what needs numpy, with torch.library.custom_op, register_fake and "
    "register_autograd",
)
AVERAGE = (
    "with momentum=None it averages over all batches, by a count whose value Python asks for",
    "give it a momentum, e.g. momentum=0.1; torch.optim.swa_utils.update_bn takes it away for its pass and, as it "
    "has failed, has not given it back: set it again, and give update_bn the plain module, which shares its buffers",
)
PACKED = (
    "pack_padded_sequence makes a result whose shape depends on the lengths",
    "give the recurrent layer the padded batch, and mask what lies behind the ends",
)
LENGTHS = (
    "how much memory ctc_loss takes depends on the values of the lengths",
    "return the log-probabilities, and compute ctc_loss outside of the module",
)
GROUPED = (
    "torch describes this op for bfloat16 alone",
    "give it tensors of bfloat16, for transformers' experts by model.to(torch.bfloat16) (autocast does not do it); "
    'their config.experts_implementation = "batched_mm" takes any dtype, but copies the weights of an expert for each '
    "token that it gets, which is many times the bytes",
)
NESTED = (
    "an encoder makes a nested tensor of what is not padding, whose shape depends on the mask",
    "make it with nn.TransformerEncoder(..., enable_nested_tensor=False)",
)
UNDESCRIBED = (
    "torch fails to describe what an op makes, though the op itself runs",
    "compute it with other ops, or give it what torch can describe (another dtype or layout, say)",
)
GENERATOR = (
    "an op draws from a torch.Generator of the module's own, which torch can trace from 2.13 on",
    "take a newer torch, or draw from the default generator",
)
LEAF = (
    "forward changes in place a leaf that requires a gradient (a parameter, or an input that no op has made), which "
    "autograd refuses in eager as well",
    "clone it first, or take the op that does not work in place (inplace=False)",
)
TAKES_FUNCTIONS = (
    "an op that takes functions (torch.cond, while_loop, flex_attention) can't be planned: which of them run may "
    "depend on a tensor's value",
    "compute both branches and choose with torch.where, or do this outside of the module",
)
MISCALLED = re.compile(r"forward\(\) (missing|takes|got) ")
APART = re.compile("found (at least )?two (different )?devices")
UNTRACED = ("torch fails where no line of the model's own runs", "leave out of the module what needs this")
BY_TYPE: tuple[tuple[type[Exception], tuple[str, str]], ...] = (
    (DataDependentOutputException, VALUE),
    (GuardOnDataDependentSymNode, VALUE),
    (DynamicOutputShapeException, SHAPE),
    (UnsupportedOperatorException, NO_FAKE),
)
BY_OP = (
    ("aten._pack_padded_sequence", PACKED),
    ("aten._ctc_loss", LENGTHS),
    ("aten._grouped_mm", GROUPED),
    ("aten._nested_tensor_from_mask", NESTED),
)
BY_TEXT = (
    ("There was no rule registered for HigherOrderOperator", TAKES_FUNCTIONS),
    ("get value out of a tracing tensor", VALUE),
    (".numpy() is not supported", NUMPY),
    ("is not supported for tensor subclasses", VALUE),
    ("no fake impl registered", NO_FAKE),
    ("Cannot access data pointer of Tensor", NO_FAKE),
    ("argument of type: <class 'torch._C.Generator'>", GENERATOR),
    (
        "modified by an inplace operation",
        ("backward needs what has been changed in place since, as it would in eager", "clone it before it is changed"),
    ),
    ("leaf Variable that requires grad", LEAF),
)


LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def explain_error(module: nn.Module, mode: ConstantFakeMode) -> Iterator[None]:
    """Raise a CaptureError in the place of what torch raises for a step of `module` that can't be captured."""
    LOG.addFilter(_is_harmless)
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        running = module_running(error.__traceback__, module)
        reason = _reason(error, running[1] if running else None) or _hidden(error, mode)
        place = source_line(error.__traceback__)
        if running:
            place = f"{place}, in {running[0]} ({type(running[1]).__name__})"
        if reason is None:
            if type(error) is RuntimeError and is_torchs(error.__traceback__):
                error.args = (f"{error}\nat {place}",)
            raise
        what, change = reason
        raise CaptureError(f"the step can't be captured at {place}: {what}\n{change}\ntorch says: {error}") from error
    finally:
        mode.failed = None  # it holds all frames of the trace
        LOG.removeFilter(_is_harmless)


def _is_harmless(record: logging.LogRecord) -> bool:
    """Whether a line of the log may stay: what is an error is raised as well."""
    return record.levelno < logging.ERROR


def _reason(error: Exception, running: nn.Module | None) -> tuple[str, str] | None:
    if isinstance(error, DataDependentOutputException) and isinstance(running, _NormBase) and running.momentum is None:
        return AVERAGE
    for op, reason in BY_OP:
        if op in str(error):
            return reason
    for kind, reason in BY_TYPE:
        if isinstance(error, kind):
            return reason
    for text, reason in BY_TEXT:
        if text in str(error):
            return reason
    return None


def _hidden(error: Exception, mode: ConstantFakeMode) -> tuple[str, str] | None:
    """The reason, if it is torch that can't do without data what it does in eager."""
    if not is_torchs(error.__traceback__):
        return None
    failed = mode.failed
    if failed is None or failed.error is not error:
        return UNTRACED if not is_users(error.__traceback__) and not _is_miscalled(error) else None
    if not failed.runs():
        return None
    return next((reason for op, reason in BY_OP if op in str(failed.op)), UNDESCRIBED)


def _is_miscalled(error: Exception) -> bool:
    """Whether Python refuses the arguments of a call, before a line of the model's own runs."""
    return type(error) is TypeError and MISCALLED.search(str(error)) is not None


def refuse_hooks(module: nn.Module) -> None:
    """A module's backward hooks would run once, while it is captured, and never again."""
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise CaptureError(
                f"{name or 'the model'} has backward hooks, which a captured step can't call: "
                "register them on the compiled module, or hooks on parameters and outputs instead"
            )


def is_device_mismatch(error: RuntimeError) -> bool:
    """Whether torch says that tensors lie on two devices; torch 2.11 has no type of its own for that."""
    return not isinstance(error, CaptureError) and APART.search(str(error)) is not None


def device_mismatch(
    error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> CaptureError:
    """What torch says of inputs that are not where the model is."""
    given = [leaf.device for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    there = ", ".join(sorted({str(other) for other in given if other != device})) or "several devices"
    return CaptureError(
        f"an input lies on {there}, but {device} is wanted, where the model is: "
        f"move it with .to({str(device)!r})\ntorch says: {error}"
    )
