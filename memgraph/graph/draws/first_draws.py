"""Draw coins before all other ops, so that a coin that falls otherwise costs no forward.

    y = linear(x)                        coin = memgraph_host::draw(...)
    coin = memgraph_host::draw(...)  ->  equal(lt(coin, 0.1), [False])
    equal(lt(coin, 0.1), [False])        y = linear(x)

Ops that read no input may run first, if each generator still draws in the same order.
"""

from __future__ import annotations

from torch import fx

from ..nodes import tensors
from ..opaque_ops import FORWARD
from ..summarize import draws, has_own_generator
from .generator_states import device_of_state
from .host_draws import DRAW

HOST = "random and numpy"
MAX_NUMEL = 1 << 16  # larger values would take memory from the start


def draw_coins_first(graph: fx.Graph, guards: set[fx.Node]) -> None:
    """Move guards that no input affects to the beginning, with all that they are computed from."""
    movable: dict[fx.Node, None] = {}
    kept: set[str] = set()  # generators from which an op draws that stays where it is
    for node in graph.nodes:
        if node.target is FORWARD:  # it may draw from any generator
            break
        generator, reads = _generator(node), node.all_input_nodes
        draws_first = bool(generator) and generator not in kept and not reads
        computes = not generator and bool(reads) and all(read in movable for read in reads)
        if (draws_first or computes) and node.op == "call_function" and _is_small(node):
            movable[node] = None
        elif generator:
            kept.add(generator)
    needed = _read_by([node for node in movable if node in guards])
    generators: set[str] = set()  # those of later draws that move
    moved = []
    for node in reversed(movable):
        if node in needed or _generator(node) in generators:
            moved.append(node)
            generators |= {_generator(node)} - {""}
    placeholders = graph.find_nodes(op="placeholder")
    for node in moved if placeholders else ():
        placeholders[-1].append(node)


def _generator(node: fx.Node) -> str:
    """Return the name of the generator from which an op draws; empty if it draws none."""
    if device := device_of_state(node):
        return device
    if node.target is DRAW:
        return HOST
    if has_own_generator(node):
        return "a module's own"
    values = tensors(node) if node.op == "call_function" and draws(node) else []
    return str(values[0].device) if values else ""


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
