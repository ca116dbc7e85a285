"""Find the state that a first step creates for a parameter, so that a loaded one can be compared with it.

    Adam, w float32[7, 11]     ->     {"step": float32[], "exp_avg": float32[7, 11], "exp_avg_sq": float32[7, 11]}

torch's own classes are stepped on meta tensors. A class of the user may do anything in a step, so it is not run, and
its state is loaded unchecked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, optim

from .elementwise import unhooked_step

KERNEL_OPTIONS = ("fused", "foreach", "capturable", "differentiable")  # do not change the entries of a state


class FirstState:
    """First steps of a class of optimizers with these arguments."""

    def __init__(self, kind: type[optim.Optimizer], arguments: Mapping[str, Any]) -> None:
        self.kind, self.arguments = kind, arguments
        self.cache: dict[object, dict[str, Any]] = {}

    def entries(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        """Return the state after a step with the options of this group; empty for a class of the user."""
        key = id(group), parameter.shape, parameter.stride(), parameter.dtype
        if key not in self.cache:
            self.cache[key] = self._step(group, torch.empty_like(parameter, device="meta"), {})[0]
        return self.cache[key]

    def needs(self, group: Mapping[str, Any], parameter: Tensor, present: Collection[str]) -> bool:
        """Return True if a step fails with only these entries: SGD, for one, does without its momentum."""
        small = torch.zeros([min(size, 2) for size in parameter.shape], dtype=parameter.dtype)
        whole, error = self._step(group, small, {})
        return self._step(group, small, {name: whole.get(name, 0) for name in present})[1] != error

    def _step(
        self, group: Mapping[str, Any], parameter: Tensor, state: Mapping[str, Any]
    ) -> tuple[dict[str, Any], str]:
        """The state after a step, and its error."""
        if not is_torch_optimizer(self.kind):
            return {}, ""
        stepped = parameter.detach().requires_grad_()
        options = {key: key not in KERNEL_OPTIONS and value for key, value in group.items() if key != "param_names"}
        entries: dict[str, Any] = {}
        try:
            optimizer = self.kind([{**options, "params": [stepped]}], **self.arguments)
            layout = torch.sparse_coo if self.kind is optim.SparseAdam else torch.strided
            stepped.grad = torch.zeros(stepped.shape, dtype=stepped.dtype, device=stepped.device, layout=layout)
            entries = optimizer.state[stepped] = dict(state) or optimizer.state[stepped]
            with torch.no_grad():
                unhooked_step(self.kind)(optimizer)
        except Exception as error:
            return entries, f"{type(error).__name__}: {error}"
        return entries, ""


def is_torch_optimizer(kind: type) -> bool:
    """Return True for a class of torch.optim."""
    return f"{kind.__module__}.".startswith("torch.optim.")
