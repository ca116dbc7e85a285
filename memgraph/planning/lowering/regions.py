"""Compile all ops of a half between two memory ops as one: what a region is, whether it can be used, and its price.

forward: 340 ops, no memory op    ->   one region, 0.9 of their time, 4 MB below their peak

Regions are segments (`passes/segments.py`) of whatever Inductor may compile, products included. A memory op stays where
the plan has it, in the code of the half. So do ops that draw random numbers, whose order Inductor does not keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from passes import Machine, Trace
from passes.segments import Price, Segment, faster_regions, find_regions, over_budget, split_region

from ...errors import LoweringError
from ...graph import inductor
from ...graph.float_arguments import float_arguments
from ...graph.nodes import all_storages, is_random, storages, tensors
from ...graph.result_layout import layout_in_storage
from ...graph.summarize import draws
from ...profile.region_profiler import RegionProfiler

LEAST = 16  # ops that compute, in a part of a region
_refused: dict[str, str] = {}  # why Inductor could not compile a region, by its digest


@dataclass(frozen=True)
class Regions:
    """The regions that are used, what runs them and their prices by name, and why other ops are not compiled as one."""

    chosen: tuple[Segment, ...] = ()
    run: Mapping[str, inductor.Segment] = field(default_factory=dict)
    prices: Mapping[str, Price] = field(default_factory=dict)
    split: str = ""


def no_regions(trace: Trace, machine: Machine, segments: Sequence[Segment], prices: Mapping[str, Price]) -> Regions:
    """Compile none."""
    return Regions()


@dataclass(frozen=True, eq=False)
class RegionCompiler:
    """Compiles the regions of a planned step that are faster than their ops in segments, and fit the budget.

    Attributes:
        nodes: of the graph, by name.
        subgraph: makes the graph of a segment.
    """

    nodes: Mapping[str, fx.Node]
    subgraph: Callable[[Segment], fx.Graph]
    profiler: RegionProfiler

    def __call__(
        self, trace: Trace, machine: Machine, segments: Sequence[Segment], prices: Mapping[str, Price]
    ) -> Regions:
        """Return the regions. One that is over the budget is compiled in two parts."""
        run: dict[str, inductor.Segment] = {}
        found: dict[str, Price] = {}
        chosen, refused = list[Segment](), list[str]()
        todo = [*find_regions(trace, lambda op: _is_compilable(self.nodes[op.name]))]
        while todo:
            region = todo.pop(0)
            compiled = _compiled(self.subgraph(region))
            price = self._price(trace, region, compiled) if isinstance(compiled, inductor.Segment) else compiled
            if isinstance(price, str) or isinstance(compiled, str):
                refused.append(str(price))
            elif not faster_regions(trace, [region], segments, {**prices, region.name: price}):
                refused.append("not faster")
            elif over_budget(trace, machine, [region], {region.name: price}):
                parts = split_region(trace, region, LEAST)
                refused += ["over the budget"] * (not parts)
                todo = [*parts, *todo]
            else:
                chosen.append(region)
                run[region.name], found[region.name] = compiled, price
        split = ", ".join(f"{count} {reason}" for reason, count in Counter(refused).items())
        return Regions(tuple(chosen), run, found, split)

    def _price(self, trace: Trace, region: Segment, run: inductor.Segment) -> Price | str:
        """Return the price of a region, relative to those of its ops, or why it can't be used."""
        reads = [tensors(self.nodes[read])[0] for read in region.reads]
        cost = self.profiler(run, reads, [read in region.frees for read in region.reads])
        if isinstance(cost, str):
            return f"refused ({cost})"
        expected = [layout_in_storage(tensors(self.nodes[value])[0]) for value in region.outputs]
        if [*cost.layouts] != expected:
            return "refused (Inductor lays out a result in another way)"
        alone_us = sum(trace.op[name].us for name in region.ops)
        return Price(alone_us * cost.us / cost.apart_us, cost.workspace)


def _compiled(part: fx.Graph) -> inductor.Segment | str:
    """Return the compiled region, or why it can't be compiled."""
    digest = inductor.digest_of(part)
    if digest not in _refused:
        try:
            return inductor.compile_segment(part)
        except LoweringError as error:
            _refused[digest] = f"refused ({str(error).splitlines()[0]})"
    return _refused[digest]


def _is_compilable(op: fx.Node) -> bool:
    """Return True for an op of torch's that only computes tensors of its own."""
    target = op.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    if (is_random(op) and draws(op)) or float_arguments(op) or not _is_of_tensors(op):
        return False
    return all(map(_is_of_tensors, op.all_input_nodes)) and storages(op).isdisjoint(all_storages(op.all_input_nodes))


def _is_of_tensors(node: fx.Node) -> bool:
    """Return True for a tensor, and for a tuple if only its tensors are read."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return bool(tensors(node)) and all(isinstance(user.meta.get("val"), Tensor) for user in node.users)
    return isinstance(value, Tensor)
