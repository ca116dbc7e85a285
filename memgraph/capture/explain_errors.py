"""Turn what torch raises while a step is traced into a `CaptureError` with source line and advice.

Errors of the user's own forward stay as they are. An op that fails on fake tensors runs once more on real ones: if it
fails there as well, as with shapes that do not fit, eager would have failed too, and only the source line is added.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
from ..guards.wrappers import describe_wrapper
from ..system.fake_log import without_fake_errors
from ..system.frames import is_refused_argument, is_torchs, is_users, module_running, source_line
from ..tensors.pytree import flatten
from .constant_fake_mode import ConstantFakeMode
from .values.host_lengths import PACKED_WEIGHTS
from .values.questions import ValuesNeeded


class Explanation(NamedTuple):
    """Reason and advice for errors of these types, or with one of these texts."""

    patterns: tuple[type[Exception] | str, ...]
    reason: str
    advice: str


# The first match counts.
EXPLANATIONS = (
    Explanation(
        ("its data is not allocated yet",),
        "an op reads the values of a tensor itself, as torch.LongTensor([x.max()]) does, and recurrent layers with "
        "packed sequences on some devices",
        "make a tensor of a list with torch.tensor or torch.stack; give a recurrent layer the padded batch, and mask "
        "what follows the ends",
    ),
    Explanation(
        (PACKED_WEIGHTS,),
        "cuDNN packs the weights of a recurrent layer into one storage, and keeps its state of dropout for the process",
        "let the layer run as it is (opaque=True, the default), in a module around it; or run it without cuDNN, with "
        "torch.backends.cudnn.enabled = False",
    ),
    Explanation(
        ("aten._nested_tensor_from_mask",),
        "an encoder makes a nested tensor of what is not padding, whose shape depends on the mask",
        "make it with nn.TransformerEncoder(..., enable_nested_tensor=False)",
    ),
    Explanation(
        ("_nested_", "NestedTensor", "nested_tensor", "self.shape_env must not be None"),
        "a nested tensor has rows of several lengths, and only dense tensors are captured",
        "pad the rows and mask what follows their ends; nn.TransformerEncoder does with enable_nested_tensor=False",
    ),
    Explanation(
        ("SparseTensorImpl", "SparseCsrTensorImpl", "SparseCooTensor", "compressed tensor"),
        "forward makes a sparse tensor, and only dense tensors are captured",
        "use index_add, scatter_reduce or segment_reduce on the indices and values, or do this outside of the module",
    ),
    Explanation(
        ("There was no rule registered for HigherOrderOperator",),
        "an op that takes functions (torch.cond, while_loop, flex_attention) can't be planned: which of them run may "
        "depend on a tensor's value",
        "compute both branches and choose with torch.where, or do this outside of the module",
    ),
    Explanation(
        ("DrawnNumber", "DrawnArray"),
        "forward draws with `random` or numpy, and computes with the number in a way that a captured step can't repeat",
        "compare it with a number, make a tensor of it at once (torch.tensor), draw it with torch, or draw it outside "
        "of the module",
    ),
    Explanation(
        (".numpy() is not supported",),
        "a tensor becomes a numpy array, but a captured step has only torch ops",
        "compute with torch ops; or make an op of what needs numpy, with torch.library.custom_op, register_fake and "
        "register_autograd",
    ),
    Explanation(
        (
            DataDependentOutputException,
            GuardOnDataDependentSymNode,
            "get value out of a tracing tensor",
            "is not supported for tensor subclasses",
        ),
        "Python asks for a tensor's value (`if`, `while`, `.item()`, `int()`), but tracing has no values of inputs",
        "compute with torch.where or a mask, decide by shapes and Python arguments, or do this outside of the module",
    ),
    Explanation(
        (DynamicOutputShapeException,),
        "the shape of a result depends on a tensor's values (`nonzero`, `unique`, a boolean index)",
        "use a mask, torch.where, or a result of fixed size",
    ),
    Explanation(
        (UnsupportedOperatorException, "no fake impl registered", "Cannot access data pointer of Tensor"),
        "an op can't be run without data: nothing says what it would make",
        "register a fake implementation for it with torch.library.register_fake, which makes an empty tensor of the "
        "shape, dtype and strides of its result; make a function that is no torch op one by torch.library.custom_op",
    ),
    Explanation(
        (SyntaxError,),
        "torch can't write down a call of an op whose name has a word of Python in it, as random_.from has",
        "call it with other arguments (random_(to), randint), or make an op of what calls it by "
        "torch.library.custom_op",
    ),
    Explanation(
        ("argument of type: <class 'torch._C.Generator'>",),
        "an op draws from a torch.Generator of the module's own, which torch can trace from 2.13 on",
        "take a newer torch, or draw from the default generator",
    ),
    Explanation(
        ("modified by an inplace operation",),
        "backward needs a tensor that was changed in place since, as it would in eager",
        "clone it before it is changed",
    ),
    Explanation(
        ("leaf Variable that requires grad",),
        "forward changes in place a leaf that requires a gradient (a parameter, or an input that is no op's result), "
        "which autograd refuses in eager as well",
        "clone it first, or use the op that does not work in place (inplace=False)",
    ),
)
CUMULATIVE_AVERAGE = Explanation(
    (),
    "with momentum=None it averages over all batches, by a count whose value Python asks for",
    "let it run as it is (opaque=True, the default), in a module around it; or give it a momentum, e.g. momentum=0.1, "
    "which torch.optim.swa_utils.update_bn takes away for its pass and, where that has failed, does not restore",
)
NO_DESCRIPTION = Explanation(
    (),
    "torch fails to describe what an op makes, though the op itself runs",
    "compute it with other ops, or give it what torch can describe (another dtype or layout, say)",
)
OBSERVED = Explanation(
    (),
    "it can't be traced, and torch refuses to run it as it is, with its ops observed",
    "compute it with other ops, or leave it out of the module",
)
NO_USER_CODE = Explanation(
    (), "torch fails where no line of the model's own runs", "leave out of the module what needs this"
)
WRONG_ARGUMENTS = re.compile(r"forward\(\) (missing|takes|got) ")
TWO_DEVICES = re.compile("found (at least )?two (different )?devices")


@contextmanager
def explain_error(module: nn.Module, mode: ConstantFakeMode) -> Iterator[None]:
    """Raise a CaptureError instead of torch's error for a step of `module` that can't be captured."""
    try:
        with without_fake_errors():
            yield
    except CaptureError:
        raise
    except ValuesNeeded as error:
        running = module_running(error.__traceback__, module)
        if running and isinstance(running[1], _NormBase):
            place = f"{source_line(error.__traceback__)}, in {running[0]} ({type(running[1]).__name__})"
            raise CaptureError(f"{place}: {CUMULATIVE_AVERAGE.reason}\n{CUMULATIVE_AVERAGE.advice}") from error
        raise
    except Exception as error:
        place = _place(error, module)
        explanation = _find(str(error), error) or _explain_failed_op(error, mode)
        if explanation is None:
            if type(error) is RuntimeError and is_torchs(error.__traceback__):
                error.args = (f"{error}\nat {place}",)
            raise
        _, reason, advice = explanation
        raise CaptureError(f"the step can't be captured at {place}: {reason}\n{advice}\ntorch says: {error}") from error
    finally:
        mode.failed = None  # it holds all frames of the trace


def refuse_if_observed(error: Exception, module: nn.Module) -> None:
    """Raise if torch itself refuses what runs while ops are observed, as those of a submodule that runs as it is.

    Raises:
        CaptureError: it does; an error that may be the forward's own is left to the caller.
    """
    explanation = _find(str(error), error)
    if (
        explanation is None
        and isinstance(error, AssertionError | NotImplementedError)
        and is_torchs(error.__traceback__)
    ):
        explanation = OBSERVED
    if explanation is not None:
        place, (_, reason, advice) = _place(error, module), explanation
        raise CaptureError(f"the step can't be captured at {place}: {reason}\n{advice}\ntorch says: {error}") from error


def only_in_trace(error: Exception, module: nn.Module) -> CaptureError:
    """Return the error for what forward raises on a trace's tensors, and not on real ones; or backward, which is not
    tried."""
    explained = CaptureError(
        f"the step can't be captured at {_place(error, module)}: what runs there raises on tensors without values, and "
        "forward does not on real ones\nask for shapes and types alone (isinstance(x, torch.Tensor)) and compute with "
        "torch ops; make an op of what needs more, with torch.library.custom_op and register_fake; or leave it out of "
        f"the module\n{type(error).__name__}: {error}"
    )
    explained.__cause__ = error
    return explained


def _place(error: Exception, module: nn.Module) -> str:
    """Return the line that raises, with the submodule that runs."""
    running, place = module_running(error.__traceback__, module), source_line(error.__traceback__)
    return f"{place}, in {running[0]} ({type(running[1]).__name__})" if running else place


def refuse_hooks(module: nn.Module) -> None:
    """Raise if a module has backward hooks, or a part is a wrapper: they would run once, while it is captured."""
    for name, part in module.named_modules():
        if name and (wrapper := describe_wrapper(part)):
            raise CaptureError(f"{name} {wrapper}")
        if part._backward_hooks or part._backward_pre_hooks:
            raise CaptureError(
                f"{name or 'the model'} has backward hooks, which a captured step can't call: "
                "register them on the compiled module, or hooks on parameters and outputs instead"
            )


def is_device_mismatch(error: RuntimeError) -> bool:
    """Return True if tensors were on two devices; torch 2.11 has no error type for that."""
    return not isinstance(error, CaptureError) and TWO_DEVICES.search(str(error)) is not None


def device_mismatch(
    error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> CaptureError:
    """Return the error for inputs that are not on the model's device."""
    devices = {leaf.device for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)} - {device}
    names = ", ".join(sorted(map(str, devices))) or "several devices"
    return CaptureError(
        f"an input is on {names}, but the model is on {device}: move it with .to({str(device)!r})\ntorch says: {error}"
    )


def _explain_failed_op(error: Exception, mode: ConstantFakeMode) -> Explanation | None:
    """Explain what torch can't trace, though it runs in eager."""
    if not is_torchs(error.__traceback__):
        return None
    failed = mode.failed
    if failed is None or failed.error is not error:
        is_call = type(error) is TypeError and WRONG_ARGUMENTS.search(str(error)) is not None
        would_fail = is_call or is_refused_argument(error)
        return None if is_users(error.__traceback__) or would_fail else NO_USER_CODE
    return _find(str(failed.op)) or NO_DESCRIPTION if failed.runs() else None


def _find(text: str, error: Exception | None = None) -> Explanation | None:
    for explanation in EXPLANATIONS:
        for pattern in explanation.patterns:
            if pattern in text if isinstance(pattern, str) else isinstance(error, pattern):
                return explanation
    return None
