"""Capture a call with floats as inputs, and compare with an earlier capture in which they were constants.

captured with the constant 0.1; now the call has 0.2   ->   captured with an input, which at 0.1 gives the first graph

Whatever the earlier trace revealed of the value (`type(scale) is float`, a C++ formula in which 1.0 is special) would
be in one graph and not in the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...errors import CaptureError
from ...graph.captured import Captured
from ...graph.guard_ops import ValueGuard
from ...system.frames import source_line
from ...tensors.loss_outputs import OutputSelector
from ...tensors.traced_number import FloatValues, TracedFloat, ValueNeededError
from ..capture import capture
from ..sizes.same_capture import describe, has_same_constants
from ..values.value_run import Measure
from .float_inputs import FloatInputs
from .type_checks import TypeChecks


@dataclass
class FloatCapture:
    """A capture in which the floats that differ from an earlier call are inputs.

    Attributes:
        earlier: captures of such calls, each with the floats of its own.
        reason: why the floats have to be constants; "" while that is unknown.
        is_other_branch: the earlier calls found other values of tensors, so they say nothing of this one.
    """

    inputs: FloatInputs
    earlier: Sequence[tuple[Captured, FloatValues]]
    reason: str = ""
    is_other_branch: bool = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, wanted: OutputSelector,
        measure: Measure,
    ) -> Captured | None:  # fmt: skip
        """Return the captured call; None if one of the floats has to be a constant."""
        checks = TypeChecks((TracedFloat,), [str(name) for _, name in self.inputs.containers.values()])
        try:
            with checks.watching():
                captured = capture(module, args, kwargs, grad=grad, wanted=wanted, floats=self.inputs, measure=measure)
            if self.inputs.trace.has_escaped():
                self.reason = "forward stores one where it outlives the call"
            elif checks.found:
                self.reason = f"its type or identity may be checked at {checks.found}"
            elif self._equals_earlier(captured):
                return replace(captured, float_values=dict(self.inputs.values))
        except ValueNeededError as error:
            self.reason = f"{error}, at {source_line(error.__traceback__)}"
        except Exception as error:
            # If the call itself fails, the capture with constants will say so.
            cause = error.__cause__ if isinstance(error, CaptureError) else None
            self.reason = str(cause) if isinstance(cause, ValueNeededError) else ""
        self.inputs.trace.has_escaped()
        return None

    def _equals_earlier(self, captured: Captured) -> bool:
        """Return True if, with the floats of an earlier call that took the same branches, this is its graph."""
        answers = [*map(_answer, captured.guards)]
        alike = [each for each in self.earlier if [*map(_answer, each[0].guards)] == answers]
        self.is_other_branch = not alike
        for earlier, values in alike:
            if any(node.compute(values) == number for node, number in captured.special_values):
                continue
            if describe(captured, values) == describe(earlier, {}) and has_same_constants(captured, earlier):
                return True
            self.reason = "the graph differs by more than the float"
        return False


def _answer(guard: ValueGuard) -> Hashable:
    return guard.question, tuple(guard.expected)
