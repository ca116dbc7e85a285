"""What a first step leaves as the state of a parameter, so that what is loaded can be compared with it.

    Adam, w float32[7, 11]     ->     {"step": float32[], "exp_avg": float32[7, 11], "exp_avg_sq": float32[7, 11]}

torch's own classes say so themselves, by a step on tensors without memory. Another class may do whatever it likes in a
step, so it is not asked, and loads what it is given, as it does unsharded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, optim

from .elementwise import unhooked_step

KERNEL_OPTIONS = (
    "fused",
    "foreach",
    "capturable",
    "differentiable",
)  # options without which the state has the same in it


class FirstState:
    """How a class of optimizers with these arguments begins."""

    def __init__(self, kind: type[optim.Optimizer], arguments: Mapping[str, Any]) -> None:
        self.kind, self.arguments = kind, arguments
        self.is_torchs = is_torch_optimizer(kind)
        self.known: dict[object, dict[str, Any]] = {}

    def entries(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        """What is there after a step with the options of this group; nothing, if the class does not say."""
        key = id(group), parameter.shape, parameter.stride(), parameter.dtype
        if key not in self.known:
            self.known[key] = self._stepped(group, torch.empty_like(parameter, device="meta"), {})[0]
        return self.known[key]

    def needs(self, group: Mapping[str, Any], parameter: Tensor, there: Collection[str]) -> bool:
        """Whether a step fails if of all entries only these are there: SGD does without its momentum."""
        small = torch.zeros([min(size, 2) for size in parameter.shape], dtype=parameter.dtype)
        whole, error = self._stepped(group, small, {})
        return self._stepped(group, small, {name: whole.get(name, 0) for name in there})[1] != error

    def _stepped(
        self, group: Mapping[str, Any], parameter: Tensor, state: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str]:
        """The state after a step, and what was wrong with that."""
        if not self.is_torchs:
            return {}, ""
        stepped = parameter.detach().requires_grad_()
        options = {
            name: False if name in KERNEL_OPTIONS else value for name, value in group.items() if name != "param_names"
        }
        found: dict[str, Any] = {}
        try:
            one = self.kind([{**options, "params": [stepped]}], **self.arguments)
            layout = torch.sparse_coo if self.kind is optim.SparseAdam else torch.strided
            stepped.grad = torch.zeros(stepped.shape, dtype=stepped.dtype, device=stepped.device, layout=layout)
            found = one.state[stepped] = dict(state) or one.state[stepped]
            with torch.no_grad():
                unhooked_step(self.kind)(one)
        except Exception as error:
            return found, f"{type(error).__name__}: {error}"
        return found, ""


def is_torch_optimizer(kind: type) -> bool:
    """Whether a class is one of torch.optim's own."""
    return f"{kind.__module__}.".startswith("torch.optim.")
