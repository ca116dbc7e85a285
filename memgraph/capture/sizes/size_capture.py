"""Capture a call with symbols for its lengths, and compare with an earlier capture of another length.

captured at length 128; now the call has 120   ->   captured at length s, which at 128 gives the first graph
then the call has 100                          ->   that capture at 100, without a trace

What the trace did not see of a size (a type check, a table of lengths in Python) makes the two graphs differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from ...errors import CaptureError
from ...graph.captured import Captured
from ...system.frames import source_line
from ...system.graph_sources import forgotten_sources
from ...tensors.loss_outputs import OutputSelector
from ...tensors.traced_number import ValueNeededError
from ...tensors.traced_size import SizeNeededError, SizeTrace
from ..capture import capture
from ..values.questions import ValuesNeeded
from ..values.value_run import Measure
from .at_lengths import at_lengths
from .same_capture import is_same_capture
from .size_inputs import SizeInputs


@dataclass(frozen=True)
class GeneralCapture:
    """A capture that serves every length for which its trace holds."""

    captured: Captured
    trace: SizeTrace

    def at(self, lengths: Sequence[int]) -> Captured:
        """Return the capture of a call with these lengths, for which the trace has to hold."""
        with forgotten_sources():
            return at_lengths(self.captured, self.trace, lengths)


@dataclass
class SizeCapture:
    """A capture in which the lengths that differ from an earlier call are symbols.

    Attributes:
        earlier: a capture of such a call.
        earlier_lengths: by symbol, in that call.
        general: the capture with symbols, once there is one.
        reason: why the lengths have to be constants; "" while that is unknown.
    """

    inputs: SizeInputs
    earlier: Captured
    earlier_lengths: Sequence[int]
    general: GeneralCapture | None = None
    reason: str = ""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, wanted: OutputSelector,
        measure: Measure,
    ) -> Captured | None:  # fmt: skip
        """Return the captured call; None if one of the lengths has to be a constant."""
        try:
            captured = capture(module, args, kwargs, grad=grad, wanted=wanted, sizes=self.inputs, measure=measure)
            # At other lengths nothing runs for the values: their steps compare them.
            general = GeneralCapture(replace(captured, value_run_nbytes=0), self.inputs.trace)
            if not general.trace.is_general:
                self.reason = "the value of a length is needed"
                return None
            if not general.trace.holds(self.earlier_lengths):
                self.reason = "an earlier length takes another branch"
            elif not is_same_capture(general.at(self.earlier_lengths), self.earlier):
                self.reason = "the graph differs by more than the length"
            else:
                _take_names(captured.graph.graph, self.earlier.graph.graph)  # so that plans fit every length
                self.general = general
                return replace(general.at(self.inputs.lengths), value_run_nbytes=captured.value_run_nbytes)
        except ValuesNeeded as error:
            self.reason = f"forward or backward needs values of tensors, at {source_line(error.__traceback__)}"
        except (SizeNeededError, ValueNeededError) as error:
            self.reason = f"{error}, at {source_line(error.__traceback__)}"
        except Exception as error:
            # If the call itself fails, the capture with constants will say so.
            cause = error.__cause__ if isinstance(error, CaptureError) else None
            self.reason = f"tracing with symbols failed: {cause or error}"
        return None


def _take_names(graph: fx.Graph, like: fx.Graph) -> None:
    """Give the nodes of a graph the names of another one."""
    for node, other in zip(graph.nodes, like.nodes, strict=True):
        node.name = other.name
        if node.op == "placeholder":
            node.target = other.target
