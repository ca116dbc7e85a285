"""Compile all ops of a half between two memory ops as one: what a region is, whether it can be used, and its price.

forward: 340 ops, no memory op    ->   one region, 0.9 of their time, 4 MB below their peak

Regions are segments (`passes/segments.py`) of whatever Inductor may compile, products included. A memory op stays where
the plan has it, in the code of the half. So do ops that draw random numbers, whose order Inductor does not keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from passes import Machine, Trace
from passes.segments import Price, Segment, faster_regions, find_regions, over_budget

from ..errors import LoweringError
from ..graph import inductor
from ..graph.float_arguments import float_arguments
from ..graph.nodes import all_storages, is_random, storages, tensors
from ..graph.result_layout import layout_in_storage
from ..graph.summarize import draws
from ..profile.region_profiler import RegionCost, RegionProfiler
from ..report.tables import mb

_refused: dict[str, str] = {}  # why Inductor could not compile a region, by its digest


@dataclass(frozen=True)
class Regions:
    """The regions of a step that are compiled, and why others are not."""

    run: dict[str, inductor.Segment]
    prices: dict[str, Price]
    found: tuple[Segment, ...]
    refused: tuple[str, ...] = ()

    def chosen(
        self, trace: Trace, machine: Machine, segments: Sequence[Segment], prices: dict[str, Price]
    ) -> tuple[tuple[Segment, ...], str]:
        """Return the regions that are faster than their ops in `segments` and fit the budget, and why others are not
        used."""
        faster = faster_regions(trace, self.found, segments, prices | self.prices)
        over = over_budget(trace, machine, faster, self.prices)
        slower = len(self.found) - len(faster)
        reasons = [f"{slower} not faster"] * bool(slower)
        reasons += [f"{len(over)} up to {mb(max(over.values(), default=0))} over the budget"] * bool(over)
        reasons += [f"{count} refused ({reason})" for reason, count in Counter(self.refused).items()]
        return tuple(region for region in faster if region.name not in over), ", ".join(reasons)


def regions_of(
    trace: Trace, nodes: dict[str, fx.Node], subgraph: Callable[[Segment], fx.Graph], profiler: RegionProfiler
) -> Regions:
    """Return the regions of a planned step, each of which has run once."""
    run, prices, refused = {}, {}, []
    candidates = find_regions(trace, lambda op: _is_compilable(nodes[op.name]))
    for region in candidates:
        compiled = _compiled(subgraph(region))
        price = _price(region, compiled, nodes, profiler) if isinstance(compiled, inductor.Segment) else compiled
        if isinstance(compiled, inductor.Segment) and isinstance(price, Price):
            run[region.name], prices[region.name] = compiled, price
        else:
            refused.append(str(price))
    return Regions(run, prices, tuple(each for each in candidates if each.name in run), tuple(refused))


def _compiled(part: fx.Graph) -> inductor.Segment | str:
    """Return the compiled region, or why it can't be compiled."""
    digest = inductor.digest_of(part)
    if digest not in _refused:
        try:
            return inductor.compile_segment(part)
        except LoweringError as error:
            _refused[digest] = str(error).splitlines()[0]
    return _refused[digest]


def _price(region: Segment, run: inductor.Segment, nodes: dict[str, fx.Node], profiler: RegionProfiler) -> Price | str:
    """Return the price of a region, or why it can't be used."""
    reads = [tensors(nodes[read])[0] for read in region.reads]
    cost = profiler(run, reads, [read in region.frees for read in region.reads])
    if not isinstance(cost, RegionCost):
        return cost
    expected = [layout_in_storage(tensors(nodes[value])[0]) for value in region.outputs]
    if [*cost.layouts] != expected:
        return "Inductor lays out a result in another way"
    return Price(cost.us, cost.workspace)


def _is_compilable(op: fx.Node) -> bool:
    """Return True for an op of torch's that only computes tensors of its own."""
    target = op.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    if (is_random(op) and draws(op)) or float_arguments(op) or not _is_of_tensors(op):
        return False
    return all(map(_is_of_tensors, op.all_input_nodes)) and storages(op).isdisjoint(all_storages(op.all_input_nodes))


def _is_of_tensors(node: fx.Node) -> bool:
    """Return True for a tensor, and for a tuple of which only tensors are read."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return bool(tensors(node)) and all(isinstance(user.meta.get("val"), Tensor) for user in node.users)
    return isinstance(value, Tensor)
