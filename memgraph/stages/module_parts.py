"""A module in parts that run one after the other, with a pause in between.

b = relu(a)                 part 1:  b = relu(a)                -> b
c = mm(b, d)        ->      part 2:  c = mm(b, d)               -> c
return c                    d may come after part 1

Values are passed on by their names. A part lets go of those that no later part reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph.nodes import named_placeholder, returned_values

Run = Callable[[fx.GraphModule, list[Any]], Iterable[Any]]


@dataclass(frozen=True, eq=False)
class ModulePart:
    """One part.

    Attributes:
        inputs: names of what it reads.
        kept: those of them that a later part reads as well, or that the module returns.
        outputs: names of what it makes for later parts, or for the caller.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    kept: frozenset[str]
    outputs: tuple[str, ...]

    def run(self, values: dict[str, Any], run: Run) -> None:
        """Run the part: take what it reads from `values`, and put in what it makes."""
        inputs = [values[name] if name in self.kept else values.pop(name) for name in self.inputs]
        values.update(zip(self.outputs, run(self.module, inputs), strict=True))


def module_parts(module: fx.GraphModule, begins: Sequence[str]) -> tuple[ModulePart, ...]:
    """Return a module in parts: a new one begins at each node in `begins`."""
    parts: list[list[fx.Node]] = [[]]
    for node in module.graph.nodes:
        if node.name in begins:
            parts.append([])
        if node.op == "call_function":
            parts[-1].append(node)
    later = {node for node in returned_values(module.graph) if isinstance(node, fx.Node)}
    made: list[ModulePart] = []
    for nodes in reversed(parts):
        made.append(_part(module, nodes, later))
        later |= {source for node in nodes for source in node.all_input_nodes}
    return tuple(reversed(made))


def _part(module: fx.GraphModule, nodes: Sequence[fx.Node], later: set[fx.Node]) -> ModulePart:
    graph, own = fx.Graph(), set(nodes)
    graph.set_codegen(type(module.graph._codegen)())
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in own)
    inputs = [node for node in read if node.op != "get_attr"]
    env = {node: named_placeholder(graph, node.name) for node in inputs}
    for node in (*(source for source in read if source.op == "get_attr"), *nodes):
        env[node] = graph.node_copy(node, env.__getitem__)
    outputs = [node for node in nodes if node in later]
    graph.output(tuple(env[node] for node in outputs))
    kept = frozenset(node.name for node in inputs if node in later)
    names = tuple(node.name for node in inputs)
    return ModulePart(fx.GraphModule(module, graph), names, kept, tuple(node.name for node in outputs))
