"""Find the parameters of an optimizer, and the group of each.

SGD([{"params": [w, b]}, {"params": [v], "lr": 0.1}])   ->   {w: 0, b: 0, v: 1}
"""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer


def parameter_groups(optimizer: Optimizer | None) -> dict[Tensor, int]:
    """Return the number of the group of each parameter, in the optimizer's order; nothing without an optimizer."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {parameter: i for i, group in enumerate(groups) for parameter in group["params"]}
