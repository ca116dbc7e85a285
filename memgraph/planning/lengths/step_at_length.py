"""The step of a call whose lengths are symbols of a capture, made of the step with symbols.

lengths 100   ->   the step with symbols, made once; its text with numbers; its code, if its plan was run before
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from ...capture.sizes.at_lengths import at_lengths
from ...capture.sizes.later_graph import LaterGraph
from ...capture.sizes.size_capture import GeneralCapture
from ...graph.accumulate_grads import mark_hooked_grads
from ...graph.gradient_sums import with_sums_in_place
from ...graph.rewrite import copy_graph
from ...guards.signature import has_gradients, parameters_read_after_backward, parameters_with_grad_hooks
from ...options.compile_options import CompileOptions
from ..known_captures import KnownLength
from ..optimizer_state import OptimizerState
from ..step_graph import Call, StepGraph, graphs_of
from ..target import Target
from .general_graph import GeneralGraph, GraphAtLength
from .general_steps import GeneralStep


def step_at_length(
    call: Call, where: Target, state: OptimizerState, options: CompileOptions, numbered: Callable[[], StepGraph]
) -> StepGraph | None:
    """Return the step of a call, made of one with symbols; None if it has to be made of its own graph."""
    module, known = call.module, call.general
    if not isinstance(known, KnownLength):
        return None
    general = known.general
    hooked = *parameters_read_after_backward(module), "", *parameters_with_grad_hooks(module)
    key = hooked, has_gradients(module.parameters())
    made = general.step(key, partial(_general_step, module=module, state=state, options=options))
    trained = state.trained(made.captured)
    ranks = state.ranks(trained, where.device)
    graphs = [made.graph] if made.later is None else [made.graph, made.later]
    # To make those graphs may have compared sizes.
    holds = general.capture.trace.holds(known.lengths) and all(graph.describes_values for graph in graphs)
    if ranks.plan_together or not holds:
        return None
    captured = at_lengths(made.captured, general.capture.trace, known.lengths)

    def step(graph: GeneralGraph, later: StepGraph | None = None) -> StepGraph:
        at_length = GraphAtLength(graph, known.lengths)
        return StepGraph(where, captured, graph.graph, trained, ranks, False, later, at_length, numbered)

    return step(made.graph, None if made.later is None else step(made.later))


def _general_step(
    capture: GeneralCapture, module: nn.Module, state: OptimizerState, options: CompileOptions
) -> GeneralStep:
    """Return the step with symbols of a capture."""
    traced = capture.captured
    captured = replace(traced, graph=LaterGraph(traced.graph, partial(copy_graph, traced.graph.graph)))
    mark_hooked_grads(captured, parameters_read_after_backward(module))
    first, later = (
        None if graph is None else GeneralGraph(with_sums_in_place(graph), captured, capture.trace)
        for graph in graphs_of(captured, module, options, state.trained(captured))
    )
    assert first is not None
    return GeneralStep(captured, first, later)
