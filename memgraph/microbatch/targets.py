"""How many targets a loss is a mean of: torch's cross entropies leave out those that do not count.

with Targets() as targets:
    loss = F.cross_entropy(out, target)          # ignore_index=-100
targets.of(loss)                                 # (target != -100).sum()
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

MEANS: dict[Callable[..., Any], inspect.Signature] = {
    function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)
}


class LossTargetCounter(TorchFunctionMode):
    """Looks at the losses that are computed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor]] = []

    def of(self, loss: Tensor) -> Tensor | None:
        """The targets that count, by their weights, if this is itself the mean over them."""
        return next((count for mean, count in self.found if mean is loss), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in MEANS:
            said = MEANS[func].bind(*args, **(kwargs or {}))
            said.apply_defaults()
            self._note(result, **said.arguments)
        return result

    def _note(
        self, result: Tensor, *, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, **others: Any
    ) -> None:
        known = others["size_average"] is None and others["reduce"] is None and not target.is_floating_point()
        if not known or reduction != "mean":
            return
        counts = target != ignore_index
        with torch.no_grad():
            total = counts if weight is None else weight[target.where(counts, 0)] * counts
            self.found.append((result, total.sum()))
