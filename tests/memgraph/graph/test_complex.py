"""Complex numbers, which torch conjugates lazily: an op that reads such a view may copy it first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memgraph
from memgraph.graph.ops import accumulate
from memgraph.profile import op_profiler
from tests.support.smallest_budget import smallest_of
from tests.support.streamed_state import SLACK, assert_kept, facts, same, streams

WIDTH = 160


class Layers(nn.Module):
    """Products with conjugated weights, whose gradients are conjugated in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = (torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH**0.5 for _ in range(4))
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in made)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight.conj()).tanh()
        return x


def train(model: nn.Module, optimizer: torch.optim.Optimizer, run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    for seed in range(3):
        x = torch.randn(8, WIDTH, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        run(x).abs().square().mean().backward()
        optimizer.step()
    found = facts(model, optimizer)
    return [None if tensor is None else tensor.resolve_conj() for tensor in found]


def test_training_equals_eager_within_the_budget() -> None:
    make: Any = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    plain, model = Layers(), Layers()
    optimizer, x = make(model.parameters()), torch.zeros(8, WIDTH, dtype=torch.complex64)
    wishes = {"optimizer": optimizer, "time_limit": 0}
    budget = int(smallest_of(lambda: memgraph.plan(model, x, budget=1, **wishes)) * SLACK)
    compiled = memgraph.compile(model, budget, **wishes)
    ours = train(model, optimizer, compiled)
    assert same(ours, train(plain, make(plain.parameters()), plain))
    assert streams(compiled)
    assert_kept(compiled, budget)


def test_the_copy_of_what_is_conjugated_is_workspace() -> None:
    model, x = nn.Linear(256, 256, bias=False, dtype=torch.complex64), torch.zeros(8, 256, dtype=torch.complex64)
    compiled = memgraph.compile(model, 10**8, time_limit=0)
    compiled(x.requires_grad_()).abs().sum().backward()
    assert_kept(compiled, 10**8)


def test_gradients_accumulate_without_a_copy() -> None:
    plain, model = Layers(), Layers()
    compiled, x = memgraph.compile(model, 10**8, time_limit=0), torch.ones(1, WIDTH, dtype=torch.complex64)
    for _ in range(3):
        for run in (plain, compiled):
            run(x).abs().sum().backward()
        assert_kept(compiled, 10**8)
    ours, theirs = ([p.grad.resolve_conj() for p in net.parameters() if p.grad is not None] for net in (model, plain))
    assert len(ours) == 4 and all(map(torch.equal, ours, theirs))


def lazily(value: Tensor, conjugated: bool, negated: bool) -> Tensor:
    """The same number, as torch has yet to make it."""
    if conjugated:
        value = value.conj().resolve_conj().conj()
    return torch._neg_view((-value).clone()) if negated and not conjugated else value


KINDS = [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize("there", KINDS)
@pytest.mark.parametrize("new", KINDS)
def test_what_is_there_and_what_is_added_may_be_yet_to_be_conjugated_or_negated(
    there: tuple[bool, bool], new: tuple[bool, bool]
) -> None:
    one, other = (torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    total, added = lazily(one.clone(), *there), lazily(other, *new)
    assert (total.is_conj(), total.is_neg(), added.is_conj(), added.is_neg()) == (*there, *new)
    assert torch.equal(total, one) and torch.equal(added, other)
    assert accumulate(total, added) is total
    assert torch.equal(total.resolve_conj().resolve_neg(), one + other)
    assert torch.equal(added, other)


class Plainly(nn.Module):
    """Complex weights whose gradients are plain, and one that is given a gradient that is yet to be conjugated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.real = nn.Parameter(torch.randn(6))
        self.first, self.second = (nn.Parameter(torch.randn(6, dtype=torch.complex64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.complex(self.real, x) * self.first + self.second).abs()


@pytest.mark.parametrize("lazy", [False, True])
def test_gradients_are_added_to_plain_complex_ones(lazy: bool) -> None:
    plain, model = Plainly(), Plainly()
    compiled = memgraph.compile(model, 10**8, time_limit=0)
    for module, run in ((plain, plain), (model, compiled)):
        for i in range(3):
            run(torch.full((6,), i + 0.5)).square().sum().backward()
            if lazy and i == 0:
                assert module.first.grad is not None
                module.first.grad = module.first.grad.conj().resolve_conj().conj()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.any()
        assert torch.equal(ours.grad.resolve_conj(), theirs.grad.resolve_conj())


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_an_op_has_a_price_of_its_own_where_what_it_reads_is_yet_to_be_conjugated(
    order: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(op_profiler, "_known", {})
    prober, workspaces = op_profiler.OpProfiler(10**9), {}
    value = torch.zeros(64, 64, dtype=torch.complex64)
    for conjugated in order:
        graph, mode = fx.Graph(), FakeTensorMode()
        node = graph.placeholder("x")
        with mode:
            fake = mode.from_tensor(value)
            node.meta["val"] = fake.conj() if conjugated else fake
            made = graph.call_function(torch.ops.aten.exp.default, (node,))
            made.meta["val"] = fake.exp()
        workspaces[conjugated] = prober(made).workspace
    assert workspaces[True] >= value.nbytes > workspaces[False]
