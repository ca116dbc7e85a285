"""The graph of one pipeline stage, from the joint graph of a step and the trace of the stage.

a = mm(x, w)                        a = placeholder      received from the stage before
b = relu(a)                ->       b = relu(a)
ga = relu_backward(d, b)            ga = relu_backward(d, b)
gw = mm(x, ga)                      return ga            sent to the stage before

`summarize` of the result is the trace of the stage, so it is planned, rewritten and partitioned as any step is.
"""

from __future__ import annotations

from torch import Tensor, fx

from passes import Trace

from ..errors import CaptureError


def stage_graph(graph: fx.Graph, stage: Trace) -> fx.Graph:
    """Return the graph that runs the ops of `stage`, a trace that `passes.stages.stage_trace` made of `graph`'s own.

    Raises:
        CaptureError: the stage would receive a value that is not one tensor.
    """
    old, new = {node.name: node for node in graph.nodes}, fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for op in stage.ops:
        source = old[op.name]
        if op.is_input and source.op == "call_function":
            env[source] = _received(new, source, op.fn)
        else:
            env[source] = new.node_copy(source, env.__getitem__)
            env[source].meta = dict(source.meta)
    output = new.output(tuple(env[old[value]] for _, value in stage.outputs))
    output.meta = graph.output_node().meta | {"kinds": tuple(kind for kind, _ in stage.outputs)}
    new.lint()
    return new


def _received(new: fx.Graph, source: fx.Node, kind: str) -> fx.Node:
    """Add an input for a value of another stage, with the layout that it has there."""
    if not isinstance(source.meta["val"], Tensor):
        raise CaptureError(
            f"a pipeline stage can't begin behind {source.name} at {source.meta.get('where', '')}, whose value is sent "
            "and is not one tensor; choose another number of stages"
        )
    node = new.placeholder(source.name)
    node.meta = {"kind": kind, "val": source.meta["val"], "where": source.meta.get("where", "")}
    return node
