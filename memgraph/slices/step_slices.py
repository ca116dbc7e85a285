"""Cut a captured step into slices, as `slices=` asks for.

slices="auto"            ->   chains at the peak of a step that does not fit run in parts, as far as that lowers it
slices={"lm_head": 16}   ->   the chain around the largest value that this submodule makes, in 16 parts
a saved plan             ->   the slices that it has
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from passes import Machine, Trace, predict
from passes.ir.invariants import check
from passes.ir.liveness import released
from passes.slices.chain import Facts
from passes.slices.choose import choose_slices, of_captured, slice_around
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


@dataclass(frozen=True)
class SliceRequest:
    """The slices that are asked for.

    Attributes:
        asked: "auto", parts by the path of a submodule, or None.
        saved: the slices of a saved plan, which count instead.
        budget: bytes of the device.
        reruns: "auto" may take chains whose forward ops run again in backward.
    """

    asked: str | Parts | None
    saved: tuple[Slice, ...]
    budget: int
    device: torch.device
    reruns: bool = False

    @property
    def is_made(self) -> bool:
        """Return True if any are asked for."""
        return self.asked is not None or bool(self.saved)


def in_slices(captured: Captured, request: SliceRequest, with_state: Callable[[Trace], Trace]) -> Captured:
    """Return the step in the slices that are asked for; "auto" leaves it whole if it fits, or if no slice helps.

    Args:
        with_state: returns a trace with optimizer states and update.

    Raises:
        ValueError: a submodule has no ops that can run in parts, or the step does not have the ops of a saved slice.
    """
    if not request.is_made:
        return captured
    trace, machine = summarize(captured.graph.graph), Machine(request.budget, str(request.device))
    peak = predict(with_state(trace), machine).peak
    if peak <= request.budget and request.asked == "auto" and not request.saved:
        return captured
    graph, slices = _prepared(captured.graph.graph), list[Slice]()
    states = peak - predict(trace, machine).peak
    facts, prepared = _facts(graph), released(summarize(graph))
    machine = replace(machine, budget=request.budget - states)
    for asked in _asked(request, prepared, machine, facts):
        before = summarize(graph)
        cut = asked if isinstance(asked, Slice) else _slice_of(before, prepared, machine, facts, asked, _unit(request))
        unrolled = unroll(before, cut, _unit(request))
        check(unrolled.trace)
        graph = sliced_graph(graph, unrolled)
        slices.append(cut)
    if not slices:
        return captured
    module = fx.GraphModule(captured.graph, graph)
    return replace(captured, graph=module, slices=tuple(slices), whole=captured, whole_nbytes=peak)


def _asked(request: SliceRequest, trace: Trace, machine: Machine, facts: Facts) -> Sequence[Slice | tuple[str, int]]:
    """Return slices, or submodules with their parts."""
    if request.saved:
        return request.saved
    if isinstance(request.asked, Mapping):
        return tuple(request.asked.items())
    return choose_slices(trace, machine, facts, _unit(request), request.reruns).slices


def _unit(request: SliceRequest) -> int:
    """Return the bytes that an allocation is rounded up to."""
    return block_nbytes(1, request.device)


def _prepared(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph in a form that has chains."""
    graph = copy_graph(graph)
    write_losses_by_row(graph)
    return graph


def _facts(graph: fx.Graph) -> Facts:
    """Return how the ops of a graph run on rows, by name; each is looked at once."""
    nodes = {node.name: node for node in graph.nodes}
    known: dict[str, RowFacts] = {}

    def facts(name: str) -> RowFacts:
        if name not in known:
            known[name] = row_facts(nodes[name]) if name in nodes else RowFacts()
        return known[name]

    return facts


def _slice_of(
    trace: Trace, captured: Trace, machine: Machine, facts: Facts, asked: tuple[str, int], unit: int
) -> Slice:
    """Return the chain around the largest value of a submodule that is not in parts already."""
    path, parts = asked
    known = of_captured(facts, captured, trace)
    own = [op for op in trace.ops if not op.is_input and op.makes and _is_in(op.where, path) and known(op.name).rules]
    for op in sorted(own, key=lambda op: -op.nbytes):
        if (found := slice_around(trace, machine, known, op.name, parts, unit)) is not None:
            return found
    raise ValueError(
        f"slices has {path!r}, which has no ops left that can run in parts; leave it out, or give slices='auto'"
    )


def _is_in(where: str, path: str) -> bool:
    """Return True if an op is of a submodule, or of one within it."""
    module = where.partition(" ")[0]
    return f".{path}." in f".{module}."
