"""The graphs of a call, each to be tried where no plan fits those before it.

recurrent layers as one op each   ->   as the ops of their steps
whole weights; chains in slices as far as "auto" goes   ->   weights in blocks of rows, in smaller ones
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from passes import Machine
from passes.slices.whole_step import has_room
from passes.slices.whole_weight import Reason, WholeWeight

from ...graph.recurrent.layer_ops import has_layers
from ...options.compile_options import CompileOptions
from ...slices.step_blocks import refused_weights
from ...slices.step_cuts import ATTEMPTS, UNROLLED, Cuts
from ..capture_step import capture_step
from ..known_captures import EarlierCapture
from ..optimizer_state import OptimizerState
from ..progress import Progress
from ..step_graph import Call, StepGraph
from ..target import Target

WORTH = 0.05  # of the smallest budget: what blocks have to spare where they are not enough


@dataclass(frozen=True)
class Attempt:
    """A graph to plan.

    Attributes:
        earlier: the capture that it was made of, if there was one.
        began: when its capture began, in seconds of `time.perf_counter`.
        whole: returns the graph without the slices that "auto" chose, which may have a faster plan; None if there are
            none, or if no plan of it fits the machine.
    """

    graph: StepGraph
    earlier: EarlierCapture | None
    began: float
    whole: Callable[[Machine], StepGraph | None] = lambda machine: None


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
        self.smallest, self.least_in_blocks = math.inf, 0

    def note_refused(self, smallest: int, least_in_blocks: int) -> None:
        """Note that the latest attempt needs so many bytes, and at least so many if weights come in blocks."""
        if smallest <= self.smallest:
            self.smallest, self.least_in_blocks = smallest, least_in_blocks

    def __iter__(self) -> Iterator[Attempt]:
        """Yield a graph, and others as long as the caller goes on."""
        first: StepGraph | None = None
        known: list[object] = []
        for cuts in ATTEMPTS:
            if first is not None and not self._may_help(cuts, first):
                continue
            earlier, began = None if cuts == UNROLLED and first is not None else self.earlier, time.perf_counter()
            graph = self._capture(earlier, cuts)
            first, self.whole = first or graph, graph.captured.whole_weights
            # The graph is that of another step if it is in slices, or has updates.
            self.earlier = replace(earlier or EarlierCapture(graph.captured), captured=graph.captured.unsliced)
            if cuts_of(graph) not in known:
                known.append(cuts_of(graph))
                yield Attempt(graph, earlier, began, partial(self._whole, graph))

    def _may_help(self, cuts: Cuts, first: StepGraph) -> bool:
        """Return True if a call that was refused may fit with these cuts."""
        if cuts == UNROLLED:
            return has_layers(first.captured.graph.graph)
        if first.ranks.plan_together or self.options.plans:
            return False
        if not cuts.level:
            return self.options.slices == "auto" and (cuts.extent != "whole" or bool(first.captured.slices))
        if self.least_in_blocks > max(first.target.budget, (1 - WORTH) * self.smallest):
            return False
        refused = Reason.RECORDED if self.options.cuda_graphs is True else self.state.whole_reason
        if refused is not None:
            self.whole = refused_weights(first.captured, refused)
        return refused is None and first.target.tiers != ()

    def _whole(self, sliced: StepGraph, machine: Machine) -> StepGraph | None:
        """Return a graph without its slices.

        It has to cost little: a call is not captured for it once more, and no segments are compiled.
        """
        is_cut = self.options.slices == "auto" and sliced.captured.slices and not sliced.captured.blocks
        is_cheap = self.state.keeps_captures and not sliced.lowers and self.options.forwards == 1
        if not is_cut or not is_cheap or sliced.ranks.plan_together or self.options.plans:
            return None
        known, cuts = sliced.captured.unsliced, Cuts("whole")
        graph = capture_step(self.call, lambda: sliced.target, self.state, self.options, known, cuts=cuts)
        return graph if has_room(graph.summarize(), machine) else None

    def _capture(self, earlier: EarlierCapture | None, cuts: Cuts) -> StepGraph:
        reused = earlier.captured if earlier is not None and self.state.keeps_captures else None
        with self.progress.capturing():
            return capture_step(self.call, self.target, self.state, self.options, reused, cuts=cuts)


def cuts_of(graph: StepGraph) -> object:
    """Return what is in parts: graphs of a call with the same parts are the same."""
    captured = graph.captured
    return captured.slices, tuple(captured.blocks.items()), has_layers(captured.graph.graph)
