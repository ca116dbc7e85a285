"""The tensors that a training makes and changes, and the seeds that it draws from.

seed(1); facts = step_facts(model, batch, outputs, loss)   ->   {"loss": ..., "grad body.weight": ..., ...}
different(facts, others)                                   ->   ["grad body.weight"]
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def seed(number: int) -> None:
    """Seed all that a model may draw from: generators of torch, Python and numpy.

    Reformer calls `torch.seed` in forward. Its number depends on the last seed alone: with one from the system, no step
    could be compared with another.
    """
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
    torch.seed = torch.random.seed = _seed


def _seed() -> int:
    drawn = (torch.default_generator.initial_seed() * 48271 + 1) % (1 << 31)
    torch.default_generator.manual_seed(drawn)
    return drawn


def step_facts(model: nn.Module, outputs: Any, loss: Tensor) -> dict[str, Tensor]:
    """Return copies of all that a step has made or changed, after backward."""
    found = {"loss": loss, **dict(tensors_in(outputs, "output"))}
    found |= {f"grad {name}": owned.grad for name, owned in model.named_parameters() if owned.grad is not None}
    found |= {f"buffer {name}": owned for name, owned in model.named_buffers()}
    found["generator"] = torch.get_rng_state()
    if loss.is_cuda:
        found["generator of the device"] = torch.cuda.get_rng_state()
    return {name: fact.detach().clone().cpu() for name, fact in found.items()}  # where nothing is counted


def tensors_in(value: Any, path: str, seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested containers and in the attributes of objects such as caches."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, str | int | float | bytes | nn.Module | type) or value is None or id(value) in seen:
        return
    seen |= {id(value)}
    for name, part in _parts(value):
        yield from tensors_in(part, f"{path}.{name}", seen)


def different(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """Return the names of facts that have not the same bits, or that one side lacks."""
    return [
        name
        for name in {**theirs, **ours}
        if name not in ours or name not in theirs or not _is_same(ours[name], theirs[name])
    ]


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | set):
        return list(enumerate(value))
    return list(getattr(value, "__dict__", {}).items())


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether both have the same bits, apart from those of a NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
