"""The graphs of a call, each to be tried where no plan fits those before it.

whole weights; chains in slices as far as "auto" goes   ->   weights in blocks of rows, in smaller ones
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from passes.slices.whole_weight import Reason, WholeWeight

from ...options.compile_options import CompileOptions
from ...slices.step_blocks import refused_weights
from ...slices.step_cuts import ATTEMPTS, Cuts
from ..capture_cache import EarlierCapture
from ..capture_step import capture_step
from ..optimizer_state import OptimizerState
from ..progress import Progress
from ..step_graph import Call, StepGraph
from ..target import Target


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
        """The slices and the blocks: graphs of a call with the same ones are the same."""
        captured = self.graph.captured
        return captured.slices, tuple(captured.blocks.items())


class Attempts:
    """The attempts at a plan of one call.

    Attributes:
        whole: the large weights that stay whole in the latest attempt with blocks.
    """

    def __init__(
        self, call: Call, target: Callable[[], Target], state: OptimizerState, options: CompileOptions,
        progress: Progress, earlier: EarlierCapture | None = None,
    ) -> None:  # fmt: skip
        """Begin; `earlier` is a capture of the same call."""
        self.call, self.target, self.state, self.options = call, target, state, options
        self.progress, self.earlier = progress, earlier
        self.whole: tuple[WholeWeight, ...] = ()

    def __iter__(self) -> Iterator[Attempt]:
        """Yield a graph, and others as long as the caller goes on."""
        first: StepGraph | None = None
        known: list[object] = []
        for cuts in ATTEMPTS:
            if first is not None and not self._may_help(cuts, first):
                continue
            earlier, began = self.earlier, time.perf_counter()
            graph = self._capture(earlier, cuts)
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
        refused = Reason.RECORDED if self.options.cuda_graphs is True else self.state.whole_reason
        if refused is not None:
            self.whole = refused_weights(first.captured, refused)
        return refused is None and first.target.tier is not None

    def _capture(self, earlier: EarlierCapture | None, cuts: Cuts) -> StepGraph:
        reused = earlier.captured if earlier is not None and self.state.keeps_captures else None
        with self.progress.capturing():
            return capture_step(self.call, self.target, self.state, self.options, reused, cuts=cuts)
