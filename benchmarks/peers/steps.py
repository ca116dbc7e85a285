"""Run the step of a small language model in one way, in a process of its own, and count its bytes.

    with Side(PeerStep, SIZES["gpt"], Way("checkpoint", checkpointed), 1) as side:
        side.do("ready")      # 61_300_000: peak bytes of a step, by a meter that shares no code with memgraph
        side.do("run")        # a step

Ways are eager and torch's own: a checkpoint of each block, hooks that save to disk, and torch.compile with a share of
its activations.  With a budget, memgraph runs the same step.
"""

from __future__ import annotations

import gc
import io
import os
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import memgraph
from benchmarks.clock import step_of
from benchmarks.contenders import Way
from benchmarks.nets import GPT, Size, checkpointed
from benchmarks.rivals import BATCH
from tests.support.allocator_meter import Allocator
from tests.support.planning_memory import anonymous_nbytes

COUNTS = "LD_PRELOAD"  # of a process whose blocks the second meter counts
WARM = 4  # steps in which code is compiled, planned, measured, and planned again
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
    Way("compile 0.5", compiled=True, share=0.5),
)


class PeerStep:
    """A step of a model that runs in one way; with a budget, memgraph's beside that way."""

    def __init__(self, size: Size, way: Way, threads: int, budget: int | None = None) -> None:
        torch.set_num_threads(threads)
        self.allocator = Allocator() if COUNTS in os.environ else None  # before any tensor exists, to count them all
        self.before = anonymous_nbytes()
        torch.manual_seed(0)
        batch = [torch.randint(size.vocabulary, (BATCH, size.context)) for _ in range(2)]
        self.ours: memgraph.CompiledModule | None = None
        if budget is None:
            self.model = GPT(size, way.through)
            self.step = step_of(self.model, partial(_loss, way, way.ready(self.model), batch))
        else:
            self.model = GPT(size)
            self.ours = memgraph.compile(self.model, budget, lower="inductor" if way.compiled else None)
            self.step = step_of(self.model, partial(self.ours, *batch))

    def ready(self) -> int | str:
        """Return the peak bytes of a step behind the first ones; in words, why it does not run.

        Without the meter, return the bytes of anonymous memory that the process had before its model.
        """
        try:
            for _ in range(WARM):
                self.step()
        except Exception as error:  # a way that fails must not end the others, and not every error can be pickled
            traceback.print_exc()
            return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        if self.allocator is None:
            return self.before
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        self.allocator.reset()
        self.step()
        return self.allocator.most + self._staging

    @property
    def _staging(self) -> int:
        """The buffers of copies to disk, which are no tensors: the meter does not see them."""
        return 0 if self.ours is None else int(self.ours.plan.forecast.by_kind["staging"].max(initial=0))

    def run(self) -> None:
        self.step()


def _loss(way: Way, called: Callable[..., Any], batch: list[Tensor]) -> Tensor:
    with way.saved():
        return called(*batch)
