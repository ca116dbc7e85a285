"""Common operations between training steps leave the budget and the optimizer unchanged.

All of them run in one start of two ranks, which return the names of those that failed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim

import memgraph
from memgraph.oss.compiled.step_memory import _update_nbytes, movable_shard_states
from memgraph.profile.memory_meter import measure_peak
from tests.memgraph.oss.test_offloaded_states import BYTES, Chain, batches, is_kept, train
from tests.support.ranks import on_ranks
from tests.support.smallest_budget import smallest_of


class Signs(optim.Optimizer):
    """The caller's own, with something that it keeps beside its states."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.kept = 0.9

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.add_(mean.mul_(self.kept).add_(parameter.grad).sign(), alpha=-group["lr"])


class Means(Signs):
    """An optimizer with `count` means, a number that is not in its groups."""

    pointwise = True

    def __init__(self, params: Any, lr: float = 0.1, count: int = 1) -> None:
        super().__init__(params, lr)
        self.count = count

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            for i in range(self.count):
                self.state[parameter].setdefault(f"mean{i}", torch.zeros_like(parameter))


def _counts_its_states() -> bool:
    """Sizes known for one optimizer are not reused for another of its class with more state."""
    sizes = []
    for count in (1, 2):
        ours = memgraph.OSS([nn.Parameter(torch.ones(5, 7))], Means, count=count)
        sizes.append(sum(_update_nbytes(ours, bucket)[0] for bucket in ours.layout.buckets))
    return sizes[1] == 2 * sizes[0]


def _loads_twice() -> bool:
    """Loading adds an option of torch to the defaults of any optimizer, which groups do not have."""
    parameters = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]
    plain, ours = Signs(parameters), memgraph.OSS([nn.Parameter(p.detach().clone()) for p in parameters], Signs)
    for lr in (0.3, 0.4):
        plain.param_groups[0]["lr"] = lr
        ours.load_state_dict(copy.deepcopy(plain.state_dict()))
    return bool(ours.param_groups[0]["lr"] == lr)


def _keeps_its_own() -> bool:
    """Its step is tried, with what it keeps, and leaves its defaults alone."""
    plain, module = Chain(), Chain()
    theirs, ours = Signs(plain.parameters()), memgraph.OSS(module.parameters(), Signs)
    model = memgraph.compile(module, "1GB", optimizer=ours, time_limit=0.0)
    train(plain, theirs, batches(), 2)
    train(model, ours, batches(), 2)
    same = all(map(torch.equal, plain.parameters(), module.parameters()))
    return same and "differentiable" not in ours.inner.defaults and is_kept(model)


def _evaluates(gather: str) -> bool:
    """Without gradients nothing is averaged in a step, which takes more than backward does with one large bucket."""

    def trained(budget: int) -> tuple[Any, memgraph.OSS]:
        module = Chain()
        ours = memgraph.OSS(module.parameters(), optim.SGD, gather=gather, lr=0.1)
        ours.comm.shared_memory = None
        return memgraph.compile(module, budget, optimizer=ours, time_limit=0.0), ours

    batch = batches()()
    model, ours = trained(smallest_of(lambda: trained(1000)[0](batch)))
    train(model, ours, batches())
    ours.gather()
    with torch.no_grad():
        model(batch)
    train(model, ours, batches())
    return is_kept(model)


def _frozen_first() -> bool:
    """A small parameter that comes first in its bucket is frozen."""
    parameters = [nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(512, 256))]
    ours = memgraph.OSS(parameters, optim.AdamW, bucket_bytes=1 << 20)
    first = {bucket.bucket.params[0] for bucket in ours.layout.buckets}
    before = [*movable_shard_states(ours).values()]
    parameters[0].requires_grad_(False)
    return first == {0} and before == [*movable_shard_states(ours).values()] and sum(before) > BYTES


def _zeroes() -> bool:
    """The shard of an averaged bucket takes no memory until the next backward, and is zero where gradients are."""
    module = Chain()
    ours = memgraph.OSS(module.parameters(), optim.SGD, lr=0.1)
    model, shards = memgraph.compile(module, "1GB", optimizer=ours, time_limit=0.0), ours.sharded_grads.shards
    train(model, ours, batches(), 1)
    freed = not shards
    model(batches()()).backward()
    ours.zero_grad(set_to_none=False)
    return freed and bool(shards) and not any(shard.any() for shard in shards.values())


def _frozen_same() -> bool:
    """Nothing stands for the gradient of what is frozen, where those that there are need not be averaged."""
    parameters = [nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(200_000))]
    ours = memgraph.OSS(parameters, optim.SGD, gradients="same", lr=0.1)
    parameters[1].requires_grad_(False)
    parameters[0].grad = torch.ones(7)
    _, seen = measure_peak(ours.step, torch.device("cpu"))
    return seen is not None and seen.peak < BYTES and parameters[0].eq(0.9).all().item() is True


def _between(rank: int) -> list[str]:
    wrong = [] if _loads_twice() else ["loads twice"]
    wrong += [] if _counts_its_states() else ["counts its states"]
    wrong += [] if _keeps_its_own() else ["keeps its own"]
    wrong += [f"evaluates, gather={gather}" for gather in ("step", "forward") if not _evaluates(gather)]
    wrong += [] if _frozen_first() else ["frozen first"]
    wrong += [] if _zeroes() else ["zeroes gradients"]
    return wrong + ([] if _frozen_same() else ["frozen, with gradients that are the same"])


@pytest.mark.long
def test_what_is_done_between_steps_costs_the_training_nothing() -> None:
    assert on_ranks(2, _between) == [[], []]
