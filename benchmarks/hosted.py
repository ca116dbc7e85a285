"""A plain rule to train a model that does not fit: weights and states are in pinned memory, and reloaded part by part.

    forward    reload a part's weights, run it, and free them; keep its input
    backward   reload them, run the part again, differentiate it, reload its states, update it, and offload all

All runs on one stream, so copies do not overlap with compute.
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
    """Some layers, whose weights and states are three flat tensors on the host."""

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
        """Reload the weights as one flat tensor, whose views are the parameters."""
        flat = self.weights.to(self.device, non_blocking=True)
        begin = 0
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            parameter.data = flat[begin : begin + shape.numel()].view(shape)
            begin += shape.numel()
        return flat

    def drop(self) -> None:
        """Free the weights on the device; the host has the same ones."""
        self.shapes = getattr(self, "shapes", [parameter.shape for parameter in self.parameters])
        for parameter in self.parameters:
            parameter.data, parameter.grad = parameter.detach().new_empty(0), None

    def step(self, flat: Tensor) -> None:
        """Update the weights with the gradients, and offload all."""
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
    """A language model in parts: embedding, blocks, and norm and head with the loss."""

    def __init__(self, model: nn.Module, parts: Sequence[nn.Module], device: torch.device) -> None:
        self.rooms: list[PinnedBlock] = []
        self.model = model
        self.parts = [Part(part, device, self.rooms) for part in parts]

    def step(self, now: Tensor, then: Tensor) -> Tensor:
        """Train on one batch, and return the loss."""
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
        """Free the memory on the host."""
        if self.rooms and torch.cuda.is_available():
            torch.cuda.synchronize()
        for part in self.parts:
            part.weights, part.states = part.weights[:0].clone(), {}
        for room in self.rooms:
            room.close()


def _again(part: Part, run: Any, x: Tensor, gradient: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Run a part again, differentiate and update it; return its result, and the gradient of `x`."""
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
    """Return zeros on the host, pinned if the device is a GPU."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=dtype)
    rooms.append(PinnedBlock(-(-count * dtype.itemsize // 4096) * 4096, device, CudaPinnedAllocator()))
    return rooms[-1].bytes[: count * dtype.itemsize].view(dtype)
