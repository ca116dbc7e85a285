"""The graphs of a call, each to be tried where no plan fits those before it.

whole weights; chains in slices as far as "auto" goes   ->   weights in blocks of rows, in smaller ones
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from passes.slices.whole_weight import Reason, WholeWeight

from ..options.compile_options import CompileOptions
from ..slices.step_blocks import refused_weights
from ..slices.step_cuts import ATTEMPTS, Cuts
from .capture_cache import EarlierCapture
from .step_graph import StepGraph

Capture = Callable[[EarlierCapture | None, Cuts], StepGraph]


@dataclass(frozen=True)
class Attempt:
    """A graph to plan.

    Attributes:
        earlier: the capture that it was made of, if there was one.
        began: when its capture began, in seconds of `time.perf_counter`.
    """

    graph: StepGraph
    earlier: EarlierCapture | None
    began: float

    @property
    def cuts(self) -> object:
        """What is cut: graphs of a call that cut the same are the same."""
        captured = self.graph.captured
        return captured.slices, tuple(captured.blocks.items())


class Attempts:
    """The attempts at a plan of one call.

    Attributes:
        whole: the large weights that stay whole in the latest attempt with blocks.
    """

    def __init__(
        self, capture: Capture, options: CompileOptions, refused: Reason | None, earlier: EarlierCapture | None = None
    ) -> None:
        """Begin.

        Args:
            refused: the reason why no weight of the step comes in blocks.
            earlier: a capture of the same call.
        """
        self.capture, self.options, self.refused, self.earlier = capture, options, refused, earlier
        self.whole: tuple[WholeWeight, ...] = ()

    def __iter__(self) -> Iterator[Attempt]:
        """Yield a graph, and others as long as the caller goes on."""
        first: StepGraph | None = None
        known: list[object] = []
        for cuts in ATTEMPTS:
            if first is not None and not self._may_help(cuts, first):
                continue
            earlier, began = self.earlier, time.perf_counter()
            graph = self.capture(earlier, cuts)
            first, self.whole = first or graph, graph.captured.whole_weights
            # The graph is that of another step if it is in slices, or has updates.
            self.earlier = replace(earlier or EarlierCapture(graph.captured), captured=graph.captured.unsliced)
            attempt = Attempt(graph, earlier, began)
            if attempt.cuts not in known:
                known.append(attempt.cuts)
                yield attempt

    def _may_help(self, cuts: Cuts, first: StepGraph) -> bool:
        """Return True if a call that was refused may fit with these cuts."""
        if first.ranks.plan_together or self.options.plans:
            return False
        if not cuts.level:
            return self.options.slices == "auto" and (cuts.extent != "whole" or bool(first.captured.slices))
        if self.refused is not None:
            self.whole = refused_weights(first.captured, self.refused)
        return self.refused is None and first.target.tier is not None
