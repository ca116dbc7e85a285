"""What torch says when a step can't be traced -> a `CaptureError` that says where, and what to change.

Only what comes from tracing is translated; an error of the user's own forward stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .errors import CaptureError
from .where import source_line

VALUE = (
    "Python asks for a tensor's value (`if`, `while`, `.item()`, `int()`), which no input's value may decide",
    "compute with torch.where or a mask, decide by shapes and Python arguments, or do this outside of the module",
)
SHAPE = (
    "the shape of a result depends on a tensor's values (`nonzero`, `unique`, a boolean index)",
    "use a mask, torch.where, or a result of fixed size",
)
NO_FAKE = ("an op can't be run without data", "register a fake implementation for it with torch.library.register_fake")
BY_TYPE: tuple[tuple[type[Exception], tuple[str, str]], ...] = (
    (DataDependentOutputException, VALUE),
    (GuardOnDataDependentSymNode, VALUE),
    (DynamicOutputShapeException, SHAPE),
    (UnsupportedOperatorException, NO_FAKE),
)
BY_TEXT = (
    ("get value out of a tracing tensor", VALUE),
    ("is not supported for tensor subclasses", VALUE),
    ("Cannot access data pointer of Tensor", NO_FAKE),
    ("leaf Variable that requires grad", ("forward changes in place what requires a gradient", "clone it first")),
)


@contextmanager
def explained() -> Iterator[None]:
    """Raise a CaptureError in the place of what torch raises for a step that can't be captured."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        what, change = reason
        message = (
            f"the step can't be captured at {source_line(error.__traceback__)}: {what}\n{change}\ntorch says: {error}"
        )
        raise CaptureError(message) from error


def _reason(error: Exception) -> tuple[str, str] | None:
    for kind, reason in BY_TYPE:
        if isinstance(error, kind):
            return reason
    for text, reason in BY_TEXT:
        if text in str(error):
            return reason
    return None
