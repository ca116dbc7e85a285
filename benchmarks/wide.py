"""AdamW with float32 states for parameters of any dtype; torch's own has bfloat16 states for bfloat16 weights.

optimizer = WideAdamW(model.parameters(), lr=3e-4)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class WideAdamW(torch.optim.Optimizer):
    """Updates in float32, and rounds the parameter to its dtype."""

    pointwise = True  # element-wise, so that memgraph may stream the states

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(parameter, parameter.grad, self.state[parameter], group)


def update(parameter: Tensor, gradient: Tensor, state: dict[str, Any], rule: dict[str, Any]) -> None:
    """Update one parameter, by the options in `rule`."""
    if not state:
        state["step"] = torch.zeros(())
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=torch.float32)
    state["step"] += 1
    step, (first, second) = int(state["step"]), rule["betas"]
    g, wide = gradient.float(), parameter.float()
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.lerp_(g, 1 - first)
    square.mul_(second).addcmul_(g, g, value=1 - second)
    divisor = square.sqrt().div_((1 - second**step) ** 0.5).add_(rule["eps"])
    wide = wide * (1 - rule["lr"] * rule["weight_decay"])
    parameter.copy_(wide.addcdiv_(mean, divisor, value=-rule["lr"] / (1 - first**step)))
