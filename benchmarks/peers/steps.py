"""Run the step of a model in one way, in a process of its own, and count its bytes.

    with Side(PeerStep, MODELS["gpt"], Way("checkpoint", checkpointed), 1) as side:
        side.do("ready")      # 61_300_000: peak bytes of a step, by a meter that shares no code with memgraph
        side.do("run")        # a step: Taken(cpu_s=0.41, faults=12)

Ways are eager and torch's own: a checkpoint of each block, hooks that save to disk, and torch.compile with a share of
its activations.  With a budget, memgraph runs the same step.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import resource
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import memgraph
from benchmarks.clock import seconds_of, step_of
from benchmarks.contenders import Way
from benchmarks.nets import checkpointed
from tests.support.allocator_meter import Allocator

from .models import Model, loss_of

COUNTS = "LD_PRELOAD"  # of a process whose blocks the second meter counts
WARM = 4  # steps in which code is compiled, planned, measured, and planned again
ALONE = 6  # steps beside the forecast: the first is behind other processes' steps, and not counted
SMALL = 1000  # elements: smaller tensors are not worth a file, as in torch's tutorial of these hooks


def save(tensor: Tensor) -> Tensor | tuple[io.RawIOBase, torch.dtype, torch.Size]:
    """Write a tensor that autograd saves to a file, which is gone with the last reference to it."""
    if tensor.numel() < SMALL:
        return tensor
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # autograd holds it until backward
    file.write(tensor.contiguous().numpy().data)
    return file, tensor.dtype, tensor.shape


def load(saved: Tensor | tuple[io.RawIOBase, torch.dtype, torch.Size]) -> Tensor:
    """Read it back."""
    if isinstance(saved, Tensor):
        return saved
    file, dtype, shape = saved
    tensor = torch.empty(shape, dtype=dtype)
    file.seek(0)
    file.readinto(tensor.numpy().data)
    return tensor


# On a CPU torch's own save_on_cpu copies nothing: the tier behind a CPU is a disk.
WAYS = (
    Way("eager"),
    Way("checkpoint", checkpointed),
    Way("save_on_disk", saved=partial(saved_tensors_hooks, save, load)),
    Way("compile", compiled=True),
    *(Way(f"compile {share}", compiled=True, share=share) for share in (0.8, 0.5, 0.2)),
)


@dataclass(frozen=True)
class Taken:
    """The cost of one step: processor seconds of all threads, and new pages."""

    cpu_s: float
    faults: int


@dataclass(frozen=True)
class Foretold:
    """memgraph's forecasts of a step, and the milliseconds of steps that follow each other.

    `repriced_ms` is the forecast at the times that its own ops took in one of the first steps, or else `ms`.
    """

    nbytes: int
    alone_ms: float
    ms: float
    repriced_ms: float


class PeerStep:
    """A step of a model that runs in one way; with a budget, memgraph's beside that way."""

    def __init__(self, built: Model, way: Way, threads: int, budget: int | None = None) -> None:
        torch.set_num_threads(threads)
        self.allocator = Allocator() if COUNTS in os.environ else None  # before any tensor exists, to count them all
        torch.manual_seed(0)
        self.batch = built.batch()
        self.ours: memgraph.CompiledModule | None = None
        if budget is None:
            self.model = built.made(way.through)
            called = way.ready(self.model)
        else:
            self.model = built.make()
            called = self.ours = memgraph.compile(self.model, budget, lower="inductor" if way.compiled else None)
        self.step = step_of(self.model, partial(_loss, way, called, self.batch))

    def ready(self) -> int | str:
        """Return the peak bytes of a step behind the first ones, 0 without the meter; in words, why it does not run."""
        try:
            for _ in range(WARM):
                self.step()
        except Exception as error:  # a way that fails must not end the others, and not every error can be pickled
            traceback.print_exc()
            return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        if self.allocator is None:
            return 0
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        self.allocator.reset()
        self.step()
        return self.allocator.most + self._staging

    @property
    def _staging(self) -> int:
        """The buffers of copies to disk, which are no tensors: the meter does not see them."""
        return 0 if self.ours is None else int(self.ours.plan.forecast.by_kind["staging"].max(initial=0))

    def run(self) -> Taken:
        before = resource.getrusage(resource.RUSAGE_SELF)
        self.step()
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        return Taken(spent, after.ru_minflt - before.ru_minflt)

    def forecast(self) -> Foretold:
        assert self.ours is not None
        steps, plan = [seconds_of(self.step) for _ in range(ALONE)], self.ours.plan
        us = plan.predicted_us
        return Foretold(plan.peak, 1e3 * median(steps[1:]), us / 1e3, (plan.repriced_us or us) / 1e3)

    def end(self) -> None:
        """Drop the model, its batch, its gradients and its plan, and give freed memory back to the system."""
        del self.model, self.batch, self.ours, self.step
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def _loss(way: Way, called: Callable[..., Any], batch: Mapping[str, Tensor]) -> Tensor:
    with way.saved():
        return loss_of(called(**batch))
