"""From which of a module's outputs backward starts, if a loss may be made of some of them.

losses({0: loss, 1: logits})      ->   [0], if the loss is made of the logits
losses({0: penalty, 1: logits})   ->   [0, 1], since the logits have a loss yet to come
scalars({0: loss, 1: logits})     ->   [0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from torch import Tensor
from torch.autograd.graph import Node

# Of the outputs that can be differentiated, by place, the places of those that a loss may be made of.
OutputSelector = Callable[[Mapping[int, Tensor]], Sequence[int]]


def select_all(outputs: Mapping[int, Tensor]) -> Sequence[int]:
    """All of them."""
    return list(outputs)


def select_losses(outputs: Mapping[int, Tensor]) -> Sequence[int]:
    """The scalars, and what is computed with parameters of its own: logits beside the loss that is made of them, or
    their softmax, are only looked at; logits beside a penalty have a loss yet to come."""
    behind = set(reachable_nodes(output.grad_fn for output in outputs.values() if output.numel() == 1))
    if not behind:
        return select_scalars(outputs)
    return [place for place, output in outputs.items() if output.numel() == 1 or _is_beside(output.grad_fn, behind)]


def _is_beside(root: Node | None, behind: Set[Node]) -> bool:
    """Whether an op that no scalar is computed by reads a parameter, on the way to this result."""
    waiting, seen = [root], set(behind)
    while waiting:
        node = waiting.pop()
        if node is None or hasattr(node, "variable"):
            return True
        if node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions if following is not None]
    return False


def select_scalars(outputs: Mapping[int, Tensor]) -> Sequence[int]:
    """The scalars, or all if there are none."""
    return [place for place, output in outputs.items() if output.numel() == 1] or list(outputs)


def select_update_roots(outputs: Mapping[int, Tensor]) -> Sequence[int]:
    """The scalars, where backward updates parameters: a gradient for anything else is refused."""
    return select_scalars(outputs)


def reachable_nodes(roots: Iterable[Node | None]) -> list[Node]:
    """All autograd nodes that the roots lead to, with them."""
    waiting = [root for root in roots if root is not None]
    found = set(waiting)
    while waiting:
        new = {following for following, _ in waiting.pop().next_functions if following is not None} - found
        found |= new
        waiting.extend(new)
    return list(found)
