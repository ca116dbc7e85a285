"""Check that after an error the next step is right, and that nothing leaks.

    module, compiled = fresh()
    ...                                       # an error is raised
    assert_next_step_right(module, compiled)

A step is right if it equals the plain module's from the same state. Leaks are counted in bytes of tensors and in open
files.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph

ROOM = "1GB"


class Net(nn.Module):
    norm: Any = nn.LayerNorm

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        block = (nn.Sequential(nn.Linear(width, width), self.norm(width), nn.GELU(), nn.Dropout(0.2)) for _ in range(1))
        self.blocks, self.last = nn.Sequential(*block), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x))


class Running(Net):
    """A net with buffers that forward changes."""

    norm = nn.BatchNorm1d


def fresh(make: type[Net] = Net, **wishes: Any) -> tuple[Net, memgraph.CompiledModule]:
    torch.manual_seed(0)
    module = make()
    return module, memgraph.compile(module, ROOM, **wishes)


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(5))


def step(model: nn.Module) -> list[Tensor]:
    """Run a step from one seed; return loss, gradients, buffers and the generator's state."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(batch()).square().mean()
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def assert_next_step_right(module: nn.Module, compiled: nn.Module) -> None:
    """Check that the compiled and the plain module take the same step from the current state."""
    state = {key: value.clone() for key, value in module.state_dict().items()}
    ours = step(compiled)
    module.load_state_dict(state)
    theirs = step(module)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


def living() -> int:
    """Return the bytes of all tensors that Python can reach."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    tensors = [tensor for tensor in tensors if tensor.layout == torch.strided]  # others are of other tests
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def failing(name: str, code: int = errno.EIO, here: bool = True, after: int = 0) -> Iterator[list[str]]:
    """Make a system call fail, except the first `after` times; only if `here`. The list has an entry for each call."""
    plain, calls = getattr(os, name), list[str]()

    def fail(*given: Any) -> Any:
        calls.append(name)
        if here and len(calls) > after:
            raise OSError(code, os.strerror(code))
        return plain(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, fail)
        yield calls
