"""Draw coins before all other ops, so that a coin that falls otherwise costs no forward.

    y = linear(x)                        coin = memgraph_host::draw(...);  memgraph_guards::equal(lt(coin, 0.1), [False])
    coin = memgraph_host::draw(...)  ->  y = linear(x)
    equal(lt(coin, 0.1), [False])

Ops that read no input may run first, if each generator still draws in the same order.
"""

from __future__ import annotations

from torch import fx

from .host_draws import DRAW
from .nodes import changes_inputs, is_random, tensors

HOST = "random and numpy"
MAX_NUMEL = 1 << 16  # larger values would take memory from the start


def draw_coins_first(graph: fx.Graph, guards: set[fx.Node]) -> None:
    """Move draws that read no input, what is computed from them alone, and the guards on that, to the beginning."""
    movable: dict[fx.Node, None] = {}
    kept: set[str] = set()  # generators from which an op draws that stays where it is
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        drawn = _generator(node)
        reads = node.all_input_nodes
        moves = (bool(drawn) or bool(reads)) and all(read in movable for read in reads) and _is_small(node)
        if moves and drawn not in kept and not changes_inputs(node):
            movable[node] = None
        elif drawn:
            kept.add(drawn)
    needed = _read_by([node for node in movable if node in guards])
    placeholders = graph.find_nodes(op="placeholder")
    last = placeholders[-1] if placeholders else None
    for node in movable:
        if last is not None and (node in needed or _generator(node)):
            last.append(node)
            last = node


def _generator(node: fx.Node) -> str:
    """Return the name of the generator from which an op draws; empty if it draws none."""
    if node.target is DRAW:
        return HOST
    values = tensors(node)
    return str(values[0].device) if is_random(node) and values else "other" if is_random(node) else ""


def _is_small(node: fx.Node) -> bool:
    return sum(value.numel() for value in tensors(node)) <= MAX_NUMEL


def _read_by(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return these nodes and all that they are computed from."""
    found: set[fx.Node] = set()
    while nodes:
        node = nodes.pop()
        if node not in found:
            found.add(node)
            nodes += node.all_input_nodes
    return found
