"""Find the parameters of an optimizer, the group of each, the optimizers in it, and the tensors of its state.

SGD([{"params": [w, b]}, {"params": [v], "lr": 0.1}])   ->   {w: 0, b: 0, v: 1}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves


def parameter_groups(optimizer: Optimizer | None) -> dict[Tensor, int]:
    """Return the number of the group of each parameter, in the optimizer's order; nothing without an optimizer."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {parameter: i for i, group in enumerate(groups) for parameter in group["params"]}


def held_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in attributes of one, and in lists, tuples and dicts there: a chain steps them in turn."""
    held: dict[int, Optimizer] = {}
    for value in vars(optimizer).values():
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        held |= {id(each): each for each in inside if isinstance(each, Optimizer) and each is not optimizer}
    return list(held.values())


def state_tensors(optimizer: Optimizer) -> Iterable[Tensor]:
    """Return the state tensors that exist now, with those of optimizers that it holds.

    Of a tensor that is made of others, as one of few bits, these are returned: its own size is that of what it means.
    """
    states = [dict(each.state) for each in (optimizer, *held_optimizers(optimizer))]
    return {id(plain): plain for leaf in tree_leaves(states) for plain in _plain_tensors(leaf)}.values()


def option_tensors(optimizer: Optimizer) -> Iterable[Tensor]:
    """Return the tensors among the options of groups, as a learning rate, with those of optimizers that it holds."""
    groups = (group for each in (optimizer, *held_optimizers(optimizer)) for group in each.param_groups)
    options = (value for group in groups for key, value in group.items() if key != "params")
    return {id(value): value for value in options if isinstance(value, Tensor)}.values()


def _plain_tensors(leaf: object) -> Iterator[Tensor]:
    if hasattr(leaf, "__tensor_flatten__"):
        for name in leaf.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(leaf, name))
    elif isinstance(leaf, Tensor):
        yield leaf
