"""Select the outputs from which backward starts, where a loss may use only some of them.

select_losses({0: loss, 1: logits})      ->   [0], if the loss is computed from the logits
select_losses({0: penalty, 1: logits})   ->   [0, 1], since the caller computes a loss of the logits
select_scalars({0: loss, 1: logits})     ->   [0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

# Takes differentiable outputs by position, and returns the positions from which backward starts.
OutputSelector = Callable[[Mapping[int, Tensor]], Sequence[int]]


def select_all(outputs: Mapping[int, Tensor]) -> Sequence[int]:
    return list(outputs)


def select_losses(outputs: Mapping[int, Tensor]) -> Sequence[int]:
    """Select scalars, and outputs that are computed with parameters of their own.

    Logits beside the loss that is computed from them are only looked at; logits beside a penalty need a loss.
    """
    behind_scalars = set(reachable_nodes(output.grad_fn for output in outputs.values() if output.numel() == 1))
    if not behind_scalars:
        return select_scalars(outputs)
    return [i for i, out in outputs.items() if out.numel() == 1 or _uses_other_parameters(out.grad_fn, behind_scalars)]


def _uses_other_parameters(root: Node | None, behind_scalars: Set[Node]) -> bool:
    """Return True if this result depends on a parameter through an op that no scalar depends on."""
    waiting, seen = [root], set(behind_scalars)
    while waiting:
        node = waiting.pop()
        if node is None or hasattr(node, "variable"):
            return True
        if node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions if following is not None]
    return False


def select_scalars(outputs: Mapping[int, Tensor]) -> Sequence[int]:
    """Select the scalars, or all outputs if there are none."""
    return [place for place, output in outputs.items() if output.numel() == 1] or list(outputs)


def select_scalars_only(outputs: Mapping[int, Tensor]) -> Sequence[int]:
    """Select the scalars; other gradients are refused: backward updates parameters, or forward can't run again."""
    return select_scalars(outputs)


def reachable_nodes(roots: Iterable[Node | None]) -> list[Node]:
    """Return all autograd nodes reachable from the roots, and the roots."""
    waiting = [root for root in roots if root is not None]
    reached = set(waiting)
    while waiting:
        new = {following for following, _ in waiting.pop().next_functions if following is not None} - reached
        reached |= new
        waiting.extend(new)
    return list(reached)


def custom_functions(roots: Iterable[Node | None]) -> list[Node]:
    """Return the functions of the user's among the autograd nodes that are reached: their backward is Python."""
    return [node for node in reachable_nodes(roots) if isinstance(node, BackwardCFunction) and not _is_ours(node)]


def _is_ours(node: BackwardCFunction) -> bool:
    """Return True if capture itself has inserted this function."""
    return str(type(node)._forward_cls.__module__).startswith("memgraph.")  # type: ignore[attr-defined]
