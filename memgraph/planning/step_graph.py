"""The graph of a call's step, with updates and collectives, that is priced and planned.

of its own                 ->   forward, backward; or a backward that adds to gradients that exist
of one with symbols        ->   the text of its lengths, and code that other lengths run too
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from passes import Trace

from ..capture.call.require_strided import require_strided_arguments
from ..capture.floats.float_capture import FloatCapture
from ..capture.sizes.size_capture import SizeCapture
from ..graph.accumulate_grads import accumulate_grads
from ..graph.captured import Captured
from ..graph.halves.partition import Partition
from ..graph.nodes import returned_values
from ..graph.result_layout import ResultLayout
from ..graph.summarize import Price, summarize, zero_cost
from ..guards.signature import has_gradients, parameters_with_grad_hooks
from ..optim.trained_parameters import TrainedParameters
from ..options.compile_options import CompileOptions
from ..profile.correct_fakes import apply_profiled_layouts
from ..tensors.loss_outputs import OutputSelector
from .known_captures import KnownLength
from .lengths.general_graph import GraphAtLength
from .ranks import Ranks
from .target import Target

CallCapture = FloatCapture | SizeCapture | KnownLength


class LayoutsDiffer(Exception):
    """Results of ops have other layouts than their fakes, in a graph with symbols."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module, whose arguments have no tensors but dense ones.

    Attributes:
        outputs: selects the outputs that backward starts from.
        general: captures it with floats as inputs or with symbols for lengths, if they can be, or knows its capture.
        opaque: submodules that run as they are, as in `CompileOptions`.
        preferred: submodules that run as they are if they can.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: OutputSelector
    general: CallCapture | None = None
    opaque: bool | Sequence[str] = False
    preferred: Sequence[str] = ()

    def __post_init__(self) -> None:
        require_strided_arguments(self.args, self.kwargs)

    @property
    def nearby(self) -> Trace | None:
        """The priced trace of the same ops with another length, if there is one."""
        return self.general.nearby if isinstance(self.general, KnownLength) else None


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The graph of a call's step.

    Attributes:
        graph: forward, backward, and what was inserted; the captured graph, or one that adds to gradients. Where the
            step is `at_length`, sizes in it are symbols.
        lowers: ops are compiled with Inductor.
        later: of the same call when gradients exist, if that is another graph and such a call may come.
        at_length: of one with symbols, if the step is made of that.
        numbered: makes the same step of a graph of its own.
    """

    target: Target
    captured: Captured
    graph: fx.Graph
    trained: TrainedParameters
    ranks: Ranks
    lowers: bool
    later: StepGraph | None = None
    at_length: GraphAtLength | None = None
    numbered: Callable[[], StepGraph] | None = None

    @property
    def traced(self) -> Captured:
        """The capture as it was traced, maybe with symbols for lengths."""
        return self.captured if self.at_length is None else self.at_length.general.captured

    def numel(self, output: int) -> int:
        """Return the number of elements of a result."""
        count = returned_values(self.traced.graph.graph)[output].meta["val"].numel()
        return int(count) if self.at_length is None else self.at_length.number(count)

    @property
    def inputs(self) -> list[fx.Node]:
        return self.graph.find_nodes(op="placeholder") if self.at_length is None else self.at_length.inputs

    @property
    def priced(self) -> Iterable[fx.Node]:
        """The ops that are priced: all, or one of each kind."""
        return self.graph.nodes if self.at_length is None else self.at_length.ops.values()

    def summarize(self, price: Price = zero_cost) -> Trace:
        """Return the text of the step."""
        return summarize(self.graph, price) if self.at_length is None else self.at_length.summarize(price)

    def correct_layouts(self, layouts: Callable[[fx.Node], tuple[ResultLayout, ...] | None]) -> None:
        """Correct fake values where real ops return another layout.

        Raises:
            LayoutsDiffer: they do, and the graph has symbols.
        """
        if self.at_length is None:
            apply_profiled_layouts(self.graph, layouts)
        elif not self.at_length.has_layouts(layouts):
            raise LayoutsDiffer

    def halves(self, applied: Trace) -> Partition | None:
        """Return both halves that run a text of the step, if they are those of other lengths."""
        return None if self.at_length is None else self.at_length.halves(applied)

    def with_numbers(self) -> StepGraph:
        """Return the same step with a graph of its own."""
        return self if self.numbered is None else self.numbered()


def graphs_of(
    captured: Captured, module: nn.Module, options: CompileOptions, trained: TrainedParameters
) -> tuple[fx.Graph, fx.Graph | None]:
    """Return the graph of a captured call, and that of the same call when gradients exist."""
    if options.accumulate or has_gradients(module.parameters()):
        return _accumulating(captured, module, options), None
    is_only = options.accumulate is False or not trained.parameters or trained.updates
    return captured.graph.graph, None if is_only else _accumulating(captured, module, options)


def _accumulating(captured: Captured, module: nn.Module, options: CompileOptions) -> fx.Graph:
    """Return the graph that adds to gradients, except those that autograd adds: of several open forwards, all."""
    by_autograd = parameters_with_grad_hooks(module) if options.forwards == 1 else dict(module.named_parameters())
    return accumulate_grads(captured, by_autograd)
