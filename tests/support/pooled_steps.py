"""Steps under a budget with the pool of pages, in a process of their own, beside eager's.

with Side(PooledSteps, 8) as side:
    side.do("begin", 16384, 0.6)  # the forecast's bytes, behind the steps in which a plan settles
    side.do("faults", 5)                   # new pages that five steps take
    side.do("equal", 200)                  # True: all gradients and parameters of 200 steps are those of eager's
"""

from __future__ import annotations

import ctypes
import gc
import resource

import torch
from torch import Tensor, nn

import memgraph
from tests.support.planning_memory import loss, net

SETTLED = 4  # steps


class PooledSteps:
    """A net of some layers, the same as it is and under a budget."""

    def __init__(self, layers: int, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self.layers = layers
        self.begin(512, 0.9)  # so that imports and threads are there
        del self.model, self.ours, self.x
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def begin(self, rows: int, share: float, width: int = 256) -> int:
        torch.manual_seed(0)
        self.model, self.x = net(width, self.layers), torch.randn(rows, width)
        whole = memgraph.plan(self.model, self.x, budget="20GB", loss=loss).peak
        self.ours = memgraph.compile(self.model, int(share * whole), loss=loss)
        for _ in range(SETTLED):
            self._step()
        assert self.ours.plan.plan, "it fits as it is"
        return self.ours.plan.peak

    def faults(self, steps: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(steps):
            self._step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def equal(self, steps: int) -> bool:
        """Train both, and return True if no bit differs in any step."""
        plain = net(self.x.shape[1], self.layers)
        plain.load_state_dict(self.model.state_dict())
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, self.model)]
        for _ in range(steps):
            self.x.normal_()
            for optimizer in optimizers:
                optimizer.zero_grad()
            for lost in (loss(plain(self.x)), self.ours(self.x)):
                lost.backward()
            if not all(map(torch.equal, _gradients(plain), _gradients(self.model))):
                return False
            for optimizer in optimizers:
                optimizer.step()
        return all(map(torch.equal, plain.parameters(), self.model.parameters()))

    def _step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.ours(self.x).backward()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
