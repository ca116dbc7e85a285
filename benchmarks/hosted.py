"""A plain rule to train what does not fit: all weights and states lie in pinned memory, and come when their part runs.

    forward    a part's weights come; it runs; they go; what it was called with stays
    backward   they come again; the part runs once more and is differentiated; its states come; it is updated; all go

One stream does all of it, one part after the other: no copy hides behind compute.  Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.wide import update
from memgraph.storage.pinned_pool import CudaPinnedAllocator, PinnedBlock

RULE = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Part:
    """Some layers, whose weights and states lie on the host as three runs of numbers."""

    def __init__(self, layers: nn.Module, device: torch.device, rooms: list[PinnedBlock]) -> None:
        self.layers, self.device = layers, device
        self.parameters = list(layers.parameters())
        count = sum(parameter.numel() for parameter in self.parameters)
        dtype = self.parameters[0].dtype
        self.weights = _room(count, dtype, device, rooms)
        self.states = {name: _room(count, torch.float32, device, rooms) for name in ("exp_avg", "exp_avg_sq")}
        self.taken = 0
        self.weights.copy_(torch.cat([parameter.detach().flatten() for parameter in self.parameters]))
        self.drop()

    def fetch(self) -> Tensor:
        """The weights come, as one run of numbers of which the parameters are views."""
        flat = self.weights.to(self.device, non_blocking=True)
        begin = 0
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            parameter.data = flat[begin : begin + shape.numel()].view(shape)
            begin += shape.numel()
        return flat

    def drop(self) -> None:
        """The weights go; on the host they are the same."""
        self.shapes = getattr(self, "shapes", [parameter.shape for parameter in self.parameters])
        for parameter in self.parameters:
            parameter.data, parameter.grad = parameter.detach().new_empty(0), None

    def step(self, flat: Tensor) -> None:
        """Update by the gradients that are there, and let all go."""
        gradient = torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])
        state: dict[str, Any] = {k: v.to(self.device, non_blocking=True) for k, v in self.states.items()}
        state["step"] = torch.tensor(float(self.taken))
        with torch.no_grad():
            update(flat, gradient, state, RULE)
        self.taken += 1
        self.weights.copy_(flat, non_blocking=True)
        for name, values in self.states.items():
            values.copy_(state[name], non_blocking=True)


class Hosted:
    """A language model by its parts: what makes vectors of tokens, blocks, and norm and head with the loss."""

    def __init__(self, model: nn.Module, parts: Sequence[nn.Module], device: torch.device) -> None:
        self.rooms: list[PinnedBlock] = []
        self.model = model
        self.parts = [Part(part, device, self.rooms) for part in parts]

    def step(self, now: Tensor, then: Tensor) -> Tensor:
        """Train one batch; the loss."""
        first, *blocks, last = self.parts
        kept = [now]
        for part in (first, *blocks):
            part.fetch()
            with torch.no_grad():
                kept.append(part.layers(kept[-1]))
            part.drop()
        norm, head = last.layers.children()

        def loss(x: Tensor) -> Tensor:
            return F.cross_entropy(head(norm(x)).flatten(0, 1).float(), then.flatten())

        found = made = _again(last, loss, kept.pop())
        for part in reversed(blocks):
            made = _again(part, part.layers, kept.pop(), made[1])
        _again(first, first.layers, kept.pop(), made[1])
        return found[0]

    def close(self) -> None:
        """Give the host's memory back."""
        if self.rooms and torch.cuda.is_available():
            torch.cuda.synchronize()
        for part in self.parts:
            part.weights, part.states = part.weights[:0].clone(), {}
        for room in self.rooms:
            room.close()


def _again(part: Part, run: Any, x: Tensor, gradient: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Run a part once more, differentiate and update it; its result, and the gradient of `x`."""
    flat = part.fetch()
    if x.is_floating_point():
        x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = run(x)
    y.backward(gradient)
    part.step(flat)
    part.drop()
    return y.detach(), x.grad


def _room(count: int, dtype: torch.dtype, device: torch.device, rooms: list[PinnedBlock]) -> Tensor:
    """Zeros on the host, pinned if the device is a GPU."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=dtype)
    rooms.append(PinnedBlock(-(-count * dtype.itemsize // 4096) * 4096, device, CudaPinnedAllocator()))
    return rooms[-1].bytes[: count * dtype.itemsize].view(dtype)
