"""Cut a captured step into slices, as `slices=` asks for.

slices="auto"            ->   chains at the peak of a step that does not fit run in parts, as far as that lowers the peak
slices={"lm_head": 16}   ->   the chain around the largest value that this submodule makes, in 16 parts
a saved plan             ->   the slices that it has
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from passes import Machine, Trace, predict
from passes.ir.invariants import BrokenTrace, check
from passes.ir.liveness import released
from passes.slices.chain import find_chains
from passes.slices.choose import choose_slices
from passes.slices.hoist import can_hoist
from passes.slices.row_rule import RowFacts
from passes.slices.slice import Slice
from passes.slices.unroll import unroll

from ..graph.captured import Captured
from ..graph.rewrite import copy_graph
from ..graph.summarize import summarize
from ..system.device import block_nbytes
from .row_facts import row_facts
from .row_losses import write_losses_by_row
from .sliced_graph import sliced_graph

Parts = Mapping[str, int]  # by the path of a submodule


def chosen_slices(captured: Captured, asked: str | Parts, budget: int, device: torch.device) -> Captured:
    """Return the step in the slices that are asked for; unchanged if "auto" finds none that help.

    Raises:
        ValueError: a submodule has no ops that can run in parts.
    """
    graph = _prepared(captured.graph.graph)
    trace, facts = summarize(graph), _facts(graph)
    machine, block = Machine(budget, str(device)), block_nbytes(1, device)
    if isinstance(asked, str):
        slices = choose_slices(released(trace), machine, facts, block).slices
    else:
        found = {path: _slice_of(released(trace), facts, path, parts, machine, block) for path, parts in asked.items()}
        _check_apart(found)
        slices = tuple(found.values())
    return _carried_out(captured, graph, slices, device)


def given_slices(captured: Captured, slices: Sequence[Slice], device: torch.device) -> Captured | None:
    """Return the step in these slices; None if they are of another step."""
    try:
        return _carried_out(captured, _prepared(captured.graph.graph), slices, device)
    except (ValueError, ZeroDivisionError, RuntimeError, BrokenTrace):
        return None  # other ops, or other sizes


def _prepared(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph in a form that has chains."""
    graph = copy_graph(graph)
    write_losses_by_row(graph)
    return graph


def _facts(graph: fx.Graph) -> Callable[[str], RowFacts]:
    """Return how the ops of a graph run on rows, by name; each is looked at once."""
    nodes = {node.name: node for node in graph.nodes}
    known: dict[str, RowFacts] = {}

    def facts(name: str) -> RowFacts:
        if name not in known:
            known[name] = row_facts(nodes[name]) if name in nodes else RowFacts()
        return known[name]

    return facts


def _slice_of(
    trace: Trace, facts: Callable[[str], RowFacts], path: str, parts: int, machine: Machine, block: int
) -> Slice:
    """Return the chain around the largest value of a submodule; of several, that of the lowest peak."""
    own = [op for op in trace.ops if not op.is_input and op.makes and _is_in(op.where, path)]
    for op in sorted(own, key=lambda op: -op.nbytes):
        chains = (found for found in find_chains(trace, facts, op.name, parts) if can_hoist(trace, found.rule, facts))
        ways = [(peak, found) for found in chains if (peak := _peak(trace, found, machine, block)) is not None]
        if ways:
            return min(ways, key=lambda way: way[0])[1]
    has = "has no ops that can run in parts" if own else "makes no value in this step"
    raise ValueError(f"slices has {path!r}, which {has}; leave it out, or give slices='auto'")


def _check_apart(found: Mapping[str, Slice]) -> None:
    """Check that no op is in the chains of two submodules."""
    owner: dict[str, str] = {}
    for path, cut in found.items():
        for name in cut.rule:
            if name in owner:
                both = f"{owner[name]!r} and {path!r}"
                raise ValueError(f"slices has {both}, whose chains share {name}; leave one of them out")
            owner[name] = path


def _peak(trace: Trace, cut: Slice, machine: Machine, block: int) -> int | None:
    """Return the peak of a step in a slice; None if it can't be carried out."""
    try:
        sliced = unroll(trace, cut, block).trace
        check(sliced)
    except (ValueError, BrokenTrace):
        return None
    return predict(sliced, machine).peak


def _is_in(where: str, path: str) -> bool:
    """Return True if an op is of a submodule, or of one within it."""
    module = where.partition(" ")[0]
    return f".{path}." in f".{module}."


def _carried_out(captured: Captured, graph: fx.Graph, slices: Sequence[Slice], device: torch.device) -> Captured:
    if not slices:
        return captured
    for cut in slices:
        unrolled = unroll(summarize(graph), cut, block_nbytes(1, device))
        check(unrolled.trace)
        graph = sliced_graph(graph, unrolled)
    return replace(captured, graph=fx.GraphModule(captured.graph, graph), slices=tuple(slices), whole=captured)
