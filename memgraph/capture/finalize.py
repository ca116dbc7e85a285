"""Turn a functional joint graph into the one that is planned and run.

    forward, backward                    ->  forward, copy_(buffer, its new value), backward
    outputs, gradients, new values       ->  outputs, gradients

Buffers are written in place, or once their old value is no longer read. An output is no view of an input. The gradient
of a parameter has its own storage, with the strides that autograd would give it. Unread nodes are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import compress

from torch import fx

from ..graph.captured import Input
from ..graph.draws.first_draws import draw_coins_first
from ..graph.nodes import (
    changed_storages,
    drop_aliases,
    drop_copies,
    drop_dead,
    drop_identity_views,
    drop_unread_statistics,
    is_guard,
    merge_constants,
    returned_values,
    storages,
)
from ..graph.opaque_ops import FORWARD
from ..graph.provenance import PROVENANCE
from .constants import drop_unread_constants
from .functionalize import FunctionalGraph
from .graph_writer import GraphWriter
from .joint.joint_graph import JointGraph
from .reinplace import reinplace

# A gradient that autograd passes on is "watched": it can't be offloaded.
RESULT_KINDS = {"output": "output", "gradient": "gradient", "input_gradient": "watched"}
PLAN_NAMES = re.compile(r"__(\d+|out|free|in_\d+|back|back_\d+|rng|swap)$")  # names that a plan adds


def finalize_graph(functional: FunctionalGraph, joint: JointGraph) -> fx.GraphModule:
    """Return the graph whose placeholders are `joint.inputs` and whose results are `joint.outputs`."""
    graph = functional.graph.graph
    outputs = [role.kind == "output" for role in joint.outputs]
    graph.output_node().args = ((*functional.results, *functional.changed.values()),)
    visible = set(compress(functional.results, outputs))
    drop_aliases(graph, kept=visible)
    drop_identity_views(graph, kept=visible)
    merge_constants(graph)
    drop_unread_statistics(graph)
    writer = GraphWriter(graph, joint.mode)
    writer.copy_overwritten_reads({place: joint.inputs[place].label for place in functional.changed})
    results, new = returned_values(graph)[: len(outputs)], returned_values(graph)[len(outputs) :]
    results = [
        writer.copy_if_view_of_input(node) if output else node for node, output in zip(results, outputs, strict=True)
    ]
    writer.write_back(functional.changed, new)
    owners = {("gradient", role.name): node for role, node in zip(joint.inputs, writer.placeholders, strict=True)}
    results = writer.copy_unlike_owner(results, [owners.get((role.kind, role.name)) for role in joint.outputs])
    graph.output_node().args = (tuple(results),)
    graph.output_node().meta["kinds"] = tuple(RESULT_KINDS[role.kind] for role in joint.outputs)
    places = [place for place in functional.changed if joint.inputs[place].kind == "buffer"]
    assigned = {writer.placeholders[place] for place in joint.assigned}
    draw_coins_first(graph, set(filter(is_guard, graph.nodes)))
    buffers = [writer.placeholders[place] for place in places]
    reinplace(graph, joint.mode, buffers, assigned, after=writer.agree_on_guards(FORWARD))
    drop_copies(graph)
    drop_dead(graph)
    _label(graph, joint.inputs)
    drop_unread_constants(functional.graph)
    graph.lint()
    functional.graph.recompile()
    return functional.graph


def _label(graph: fx.Graph, inputs: Iterable[Input]) -> None:
    """Give placeholders readable names, and keep the meta of nodes that the rest of memgraph reads."""
    changed = changed_storages(graph)
    for node, role in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        name = role.name or f"{role.kind}_{role.index}"
        node._rename(re.sub(r"\W", "_", name))
        node.target = node.name
        # A parameter that forward writes to counts as a buffer: only what is never written can be streamed.
        is_written = role.kind == "parameter" and not changed.isdisjoint(storages(node))
        kind = "buffer" if is_written else role.kind
        node.meta = {"kind": kind, "val": node.meta["val"], PROVENANCE: {"phase": "forward", "where": name}}
    for node in graph.nodes:
        if PLAN_NAMES.search(node.name):
            node._rename(f"{node.name}_")
        if node.op != "output":
            provenance = node.meta.get(PROVENANCE, {"phase": "forward", "where": ""})
            kept = {key: node.meta[key] for key in ("val", "kind") if key in node.meta}
            node.meta = kept | {key: provenance[key] for key in ("phase", "where", "part") if key in provenance}
        if node.op == "get_attr":  # in front of all ops, though backward alone may read it
            node.meta["phase"] = "forward"
