"""Cut a captured step into slices, as `slices=` asks for.

slices="auto"            ->   chains at the peak of a step that does not fit run in parts, as far as that lowers it
slices={"lm_head": 16}   ->   the chain around the largest value that this submodule makes, in 16 parts; one in each
                              micro-batch
a saved plan             ->   the slices that it has

Write losses over classes so that only what reads all classes has the rows of the batch.

    l, n = nll_loss_forward(p, y)              one = where(y == ignored, y, 0)              # the class of [rows, 1]
    ...                                        g = gather(p, 1, where(y == ignored, 0, y))  # [rows, 1]
    d = nll_loss_backward(t, p, y, n)    ->    l, _ = nll_loss_forward(g, one)
                                               _, n = nll_loss_forward(zeros, one)
                                               d = nll_loss_backward(t, p, y, n)

A loss of each row is -g, and 0 where it is ignored. A loss of all adds up the same numbers in the same order, so it
has the same bits. The number of rows that count, `n`, no longer depends on p: parts of the rows can have their gradient
before the loss of all is known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, fx

from passes import Machine, Trace, predict
from passes.ir.invariants import BrokenTrace, check
from passes.ir.liveness import released
from passes.ir.trace import Op
from passes.slices.chain import Facts
from passes.slices.choose import choose_slices, of_captured, slice_around
from passes.slices.row_rule import RowFacts
from passes.slices.slice import Slice
from passes.slices.unroll import unroll

from ..graph.captured import Captured
from ..graph.nodes import aten, fake_result
from ..graph.rewrite import copy_graph, fake_mode
from ..graph.summarize import summarize
from ..system.device import block_nbytes
from ..system.fake_log import without_fake_errors
from .row_facts import row_facts
from .sliced_graph import sliced_graph

Parts = Mapping[str, int]  # by the path of a submodule
# Chains that run nothing twice; those as well whose forward ops run again in backward; none.
Extent = Literal["once", "twice", "whole"]
EXTENTS: tuple[Extent, ...] = ("once", "twice", "whole")
LOSS = aten.nll_loss_forward.default


@dataclass(frozen=True)
class SliceRequest:
    """The slices that are asked for.

    Attributes:
        asked: "auto", parts by the path of a submodule, or None.
        saved: the slices of each saved plan, which count instead; a call of another step is left whole.
        budget: bytes of the device.
        extent: how far "auto" goes.
    """

    asked: str | Parts | None
    saved: tuple[tuple[Slice, ...], ...]
    budget: int
    device: torch.device
    extent: Extent = "once"

    @property
    def is_made(self) -> bool:
        """Return True if any are asked for."""
        return self.saved != () or (self.asked is not None and (self.asked != "auto" or self.extent != "whole"))

    @property
    def unit(self) -> int:
        """Return the bytes that an allocation is rounded up to."""
        return block_nbytes(1, self.device)


def in_slices(captured: Captured, request: SliceRequest, with_state: Callable[[Trace], Trace]) -> Captured:
    """Return the step in the slices that are asked for; "auto" leaves it whole if it fits, or if no slice helps.

    Args:
        with_state: returns a trace with optimizer states and update.

    Raises:
        ValueError: a submodule has no ops that can run in parts.
    """
    if not request.is_made:
        return captured
    trace, machine = summarize(captured.graph.graph), Machine(request.budget, str(request.device))
    peak = predict(with_state(trace), machine).peak
    if not request.saved and request.asked == "auto" and peak <= request.budget:
        return captured
    room = request.budget - peak + predict(trace, machine).peak  # beside optimizer states
    graph, slices = _sliced(captured.graph.graph, request, replace(machine, budget=room))
    if not slices:
        return captured
    module = fx.GraphModule(captured.graph, graph)
    return replace(captured, graph=module, slices=slices, whole=captured, whole_nbytes=peak)


def _sliced(graph: fx.Graph, request: SliceRequest, machine: Machine) -> tuple[fx.Graph, tuple[Slice, ...]]:
    """Return a copy of the graph in slices, and these."""
    graph = copy_graph(graph)
    write_losses_by_row(graph)
    for slices in request.saved:
        with suppress(ValueError, RuntimeError, ZeroDivisionError, BrokenTrace):  # other ops, or other sizes
            return _carried_out(graph, slices, request.unit), slices
    if request.saved:
        return graph, ()
    facts = _facts(graph)
    if not isinstance(request.asked, Mapping):
        captured = released(summarize(graph))
        slices = choose_slices(captured, machine, facts, request.unit, request.extent == "twice").slices
        return _those_that_run(graph, slices, request.unit)
    return _of_submodules(graph, request.asked, machine, facts, request.unit)


def _of_submodules(
    graph: fx.Graph, asked: Parts, machine: Machine, facts: Facts, unit: int
) -> tuple[fx.Graph, tuple[Slice, ...]]:
    """Return the graph in chains of these submodules, and these.

    The largest values come first, and of those the earliest, in whatever order they are asked for: the chain around a
    small value may take larger ones along, and leave nothing of them.
    """
    captured, made = released(summarize(graph)), dict[str, tuple[Slice, ...]]()
    seeds = {path: _seeds(captured, facts, path) for path in asked}
    order = {op.name: (-op.nbytes, i) for i, op in enumerate(captured.ops)}
    for path in sorted(asked, key=lambda path: (*min((order[op.name] for op in seeds[path]), default=(0, 0)), path)):
        for alike in _alike(seeds[path]):
            cuts: tuple[Slice, ...] = ()
            for seed in alike:
                trace = released(summarize(graph))
                known = of_captured(facts, captured, trace)
                cut = slice_around(trace, machine, known, seed, asked[path], unit) if seed in trace.op else None
                if cut is not None:
                    graph, cuts = _asked_for(graph, cut, path, unit), (*cuts, cut)
            if cuts:
                made[path] = cuts
                break
        else:
            raise ValueError(_no_ops_left(path, {op.name for op in seeds[path]}, made))
    return graph, tuple(cut for cuts in made.values() for cut in cuts)


def _seeds(trace: Trace, facts: Facts, path: str) -> list[Op]:
    """Return the ops of a submodule that can run in parts, those of the largest values first."""
    own = [op for op in trace.ops if not op.is_input and op.makes and _is_in(op.where, path) and facts(op.name).rules]
    return sorted(own, key=lambda op: -op.nbytes)


def _alike(seeds: Sequence[Op]) -> Iterable[list[str]]:
    """Return the names of ops in their order; those that one op of the module makes together, as in micro-batches."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for op in seeds:
        groups.setdefault((op.fn, op.type, op.where, op.phase), []).append(op.name)
    return groups.values()


def _asked_for(graph: fx.Graph, cut: Slice, path: str, unit: int) -> fx.Graph:
    """Return the graph in a slice of a submodule.

    Raises:
        ValueError: torch does not run it in parts.
    """
    try:
        return _carried_out(graph, (cut,), unit)
    except RuntimeError as error:
        raise ValueError(
            f"slices has {path!r}, but torch can't run its ops in {cut.parts} parts: {error}; leave it out, or give"
            " slices='auto'"
        ) from error


def _no_ops_left(path: str, own: set[str], made: Mapping[str, Iterable[Slice]]) -> str:
    """Return what is wrong with a submodule of these ops without a chain, where others have theirs."""
    others = [other for other, cuts in made.items() if any(not own.isdisjoint(cut.rule) for cut in cuts)]
    run = f": they run with those of {', '.join(map(repr, others))}" if others else ""
    return f"slices has {path!r}, which has no ops left that can run in parts{run}; leave it out, or give slices='auto'"


def _those_that_run(graph: fx.Graph, slices: Sequence[Slice], unit: int) -> tuple[fx.Graph, tuple[Slice, ...]]:
    """Return the graph in those of the slices that torch can run in parts, and these."""
    made: tuple[Slice, ...] = ()
    for cut in slices:
        with suppress(ValueError, RuntimeError, BrokenTrace):  # ValueError: it has ops of one that was left out
            graph, made = _carried_out(graph, (cut,), unit), (*made, cut)
    return graph, made


def _carried_out(graph: fx.Graph, slices: Sequence[Slice], unit: int) -> fx.Graph:
    """Return the graph in slices.

    Raises:
        ValueError, RuntimeError, BrokenTrace: it is not the graph that they were made for.
    """
    for cut in slices:
        unrolled = unroll(summarize(graph), cut, unit)
        check(unrolled.trace)
        with without_fake_errors():
            graph = sliced_graph(graph, unrolled)
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


def _is_in(where: str, path: str) -> bool:
    """Return True if an op is of a submodule, or of one within it."""
    module = where.partition(" ")[0]
    return f".{path}." in f".{module}."


def write_losses_by_row(graph: fx.Graph) -> None:
    """Rewrite the losses of a graph that have no weights of classes. Changes the graph."""
    for node in graph.find_nodes(op="call_function", target=LOSS):
        values, target = (read.meta["val"] for read in node.all_input_nodes[:2])
        if node.args[2] is None and values.dim() == 2 and target.dim() == 1:
            _rewrite(node)


def _rewrite(node: fx.Node) -> None:
    graph, mode = node.graph, fake_mode(node.graph)
    values, target = node.all_input_nodes[:2]
    reduction, ignored = node.args[3:5]
    value: Tensor = values.meta["val"]

    def add(target: object, *args: object, **kwargs: object) -> fx.Node:
        new = graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        new.meta = {**node.meta}
        new.meta["val"] = fake_result(new, mode)
        return new

    with graph.inserting_before(node):
        is_ignored = add(aten.eq.Scalar, target, ignored)
        one_class = add(aten.masked_fill.Scalar, add(aten.mul.Scalar, target, 0), is_ignored, ignored)
        index = add(aten.unsqueeze.default, add(aten.masked_fill.Scalar, target, is_ignored, 0), 1)
        picked = add(aten.gather.default, values, 1, index)
        zeros = add(aten.zeros.default, [value.shape[0], 1], dtype=value.dtype, device=value.device)
        counted = add(LOSS, zeros, one_class, None, reduction, ignored)
        if reduction == 0:
            loss = add(aten.masked_fill.Scalar, add(aten.neg.default, add(aten.squeeze.dim, picked, 1)), is_ignored, 0)
        else:
            loss = add(operator.getitem, add(LOSS, picked, one_class, None, reduction, ignored), 0)
        weight = add(operator.getitem, counted, 1)
    for item in list(node.users):
        item.replace_all_uses_with(weight if item.args[1] == 1 else loss)
        graph.erase_node(item)
    graph.erase_node(node)
