"""A functional joint graph -> the graph that is planned and run.

    forward, backward                    ->  forward, copy_(buffer, its new value), backward
    outputs, gradients, new values       ->  outputs, gradients

What the module changes is written where it is, or back once nobody wants the old value.  An output is never a piece of
an input.  The gradient of a parameter alone holds its storage, and has the strides that autograd would give it.  What
nobody reads is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import compress

from torch import fx

from ..graph.captured import Input
from ..graph.nodes import (
    changed_storages,
    drop_aliases,
    drop_copies,
    drop_dead,
    drop_identity_views,
    drop_unread_statistics,
    merge_constants,
    returned_values,
    storages,
)
from ..graph.provenance import PROVENANCE
from .functionalize import FunctionalGraph
from .graph_writer import GraphWriter
from .reinplace import reinplace
from .trace_joint import JointGraph

# What is said of a gradient that autograd hands on, and that can't go elsewhere: it is watched.
HANDED = {"output": "output", "gradient": "gradient", "input_gradient": "watched"}
OURS = re.compile(r"__(\d+|out|free|in_\d+|back|back_\d+|rng|swap)$")  # names that a plan gives


def finalize_graph(found: FunctionalGraph, joint: JointGraph) -> fx.GraphModule:
    """The graph whose placeholders are `joint.inputs` and which returns `joint.outputs`."""
    graph = found.graph.graph
    outputs = [role.kind == "output" for role in joint.outputs]
    graph.output_node().args = ((*found.handed, *found.changed.values()),)
    shown = set(compress(found.handed, outputs))
    drop_aliases(graph, kept=shown)
    drop_identity_views(graph, kept=shown)
    merge_constants(graph)
    drop_unread_statistics(graph)
    desk = GraphWriter(graph, joint.mode)
    desk.shield({place: joint.inputs[place].label for place in found.changed})
    handed, new = returned_values(graph)[: len(outputs)], returned_values(graph)[len(outputs) :]
    handed = [desk.own_output(node) if output else node for node, output in zip(handed, outputs, strict=True)]
    desk.write_back(found.changed, new)
    owners = {("gradient", role.name): node for role, node in zip(joint.inputs, desk.placeholders, strict=True)}
    handed = desk.own_gradients(handed, [owners.get((role.kind, role.name)) for role in joint.outputs])
    graph.output_node().args = (tuple(handed),)
    graph.output_node().meta["kinds"] = tuple(HANDED[role.kind] for role in joint.outputs)
    places = [place for place in found.changed if joint.inputs[place].kind == "buffer"]
    assigned = {desk.placeholders[place] for place in joint.assigned}
    reinplace(graph, joint.mode, [desk.placeholders[place] for place in places], assigned)
    drop_copies(graph)
    drop_dead(graph)
    _label(graph, joint.inputs)
    graph.lint()
    found.graph.recompile()
    return found.graph


def _label(graph: fx.Graph, inputs: Iterable[Input]) -> None:
    """Readable names for the placeholders, and on every node only what the rest of memgraph reads."""
    changed = changed_storages(graph)
    for node, role in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        name = role.name or f"{role.kind}_{role.index}"
        node._rename(re.sub(r"\W", "_", name))
        node.target = node.name
        # A parameter that forward writes to is no different from a buffer, and stays: what is streamed is only read.
        is_written = role.kind == "parameter" and not changed.isdisjoint(storages(node))
        kind = "buffer" if is_written else role.kind
        node.meta = {"kind": kind, "val": node.meta["val"], PROVENANCE: {"phase": "forward", "where": name}}
    for node in graph.nodes:
        if OURS.search(node.name):
            node._rename(f"{node.name}_")
        if node.op != "output":
            notes = node.meta.get(PROVENANCE, {"phase": "forward", "where": ""})
            kept = {key: node.meta[key] for key in ("val", "kind") if key in node.meta}
            node.meta = kept | {name: notes[name] for name in ("phase", "where", "part") if name in notes}
