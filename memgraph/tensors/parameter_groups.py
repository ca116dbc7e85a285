"""Find the parameters of an optimizer, the group of each, and the tensors of its state.

SGD([{"params": [w, b]}, {"params": [v], "lr": 0.1}])   ->   {w: 0, b: 0, v: 1}
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves


def parameter_groups(optimizer: Optimizer | None) -> dict[Tensor, int]:
    """Return the number of the group of each parameter, in the optimizer's order; nothing without an optimizer."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {parameter: i for i, group in enumerate(groups) for parameter in group["params"]}


def state_tensors(optimizer: Optimizer) -> Iterable[Tensor]:
    """Return the state tensors that exist now."""
    return (leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor))
