"""Optimizers that are no functions of elements: a chain, and classes that keep their states in various ways."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim

if TYPE_CHECKING:  # it wants pytest
    from tests.support.streamed_state import Optimizer


class Chain(optim.Optimizer):
    """Steps others in turn, as training code for Muon does."""

    def __init__(self, *parts: optim.Optimizer) -> None:
        self.optimizers = [*parts]
        super().__init__(
            [parameter for part in parts for group in part.param_groups for parameter in group["params"]], {}
        )

    def step(self, closure: Any = None) -> Any:
        for part in self.optimizers:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.optimizers:
            part.zero_grad(set_to_none)


def muon_and_adamw(parameters: Iterator[nn.Parameter]) -> Chain:
    """Return a chain of Muon for matrices and AdamW for the rest, and for the last matrix."""
    owned = list(parameters)
    matrices = [p for p in owned if p.dim() == 2]
    rest = [p for p in owned if p.dim() != 2] + matrices[-1:]
    return Chain(optim.Muon(matrices[:-1], lr=0.02), optim.AdamW(rest, lr=1e-2))


class Own(optim.AdamW):
    """May do anything, for all that is known of it."""


class Nested(optim.Optimizer):
    """Keeps a list of rows' sums and of tensors in a dict, and makes new tensors in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"count": 0, "sums": [torch.zeros_like(p)], "more": {"rows": torch.zeros(len(p))}}
                state["count"] += 1
                state["sums"][0] = state["sums"][0] * 0.9 + p.grad
                state["more"]["rows"] += p.grad.flatten(1).sum(1) if p.dim() > 1 else p.grad
                p.add_(state["sums"][0] / (1 + state["more"]["rows"].square().mean()), alpha=-group["lr"])


class Counting(optim.AdamW):
    """Counts its steps where all parameters share it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


class Clipping(optim.SGD):
    """Clips the norm of all gradients, where it is large."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(torch.clamp(2000 / norm, max=1.0))
        return super().step(closure)


class Tally:
    """Is kept by an optimizer, and counts."""

    def __init__(self) -> None:
        self.steps = 0


class Telling(optim.SGD):
    """Tells an object of each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.tally = Tally()

    def step(self, closure: Any = None) -> Any:
        self.tally.steps += 1
        return super().step(closure)


WHOLE: dict[str, Optimizer] = {
    "muon and adamw": muon_and_adamw,
    "adafactor": partial(optim.Adafactor, lr=1e-2),
    "own": partial(Own, lr=1e-2),
    "nested": Nested,
}


def tensors_of(optimizer: optim.Optimizer) -> list[Tensor]:
    """Return copies of all tensors in the states of an optimizer, in order."""
    parts = getattr(optimizer, "optimizers", [optimizer])
    states = [
        part.state[p] for part in parts for group in part.param_groups for p in group["params"] if p in part.state
    ]
    return [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(states) if isinstance(leaf, Tensor)]
