"""Several runs of one module before their backward: gradients are summed in eager's order, and then added."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.runtime import concurrent_runs
from memgraph.runtime.step_run import StepRun

ROOM = "1GB"


class Body(nn.Module):
    """Each weight is used once: the sum of its gradients has one order."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).tanh())


def batch(seed: int, rows: int = 7) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def assert_alike(loop: Callable[[Any], object], make: Callable[[], nn.Module] = Body) -> None:
    """The loop leaves the same gradients in the compiled module as in the plain one."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = make()
        loop(memgraph.compile(module, ROOM) if compiled else module)
        found.append([parameter.grad for parameter in module.parameters()])
    for theirs, ours in zip(*found, strict=True):
        assert theirs is not None
        assert ours is not None
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("rows", [7, 5])
def test_a_siamese_loss_accumulates(rows: int) -> None:
    def loop(q: Any) -> None:
        for seed in range(0, 8, 2):
            (q(batch(seed)).mean(0) - q(batch(seed + 1, rows)).mean(0)).square().mean().backward()

    assert_alike(loop)


def test_a_recurrent_cell_accumulates() -> None:
    def loop(cell: Any) -> None:
        for seed in range(3):
            h = torch.zeros(7, 8)
            for i in range(4):
                h = cell(batch(4 * seed + i), h)
            h.square().mean().backward()

    assert_alike(loop, lambda: nn.RNNCell(8, 8))


def test_three_runs_accumulate() -> None:
    def loop(q: Any) -> None:
        for seed in range(0, 9, 3):
            a, b, c = (q(batch(seed + i)) for i in range(3))
            ((a - b).square().mean() - (a - c).square().mean()).exp().backward()

    assert_alike(loop)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_losses_of_two_runs_accumulate_one_by_one(order: Sequence[int]) -> None:
    def loop(q: Any) -> None:
        for seed in range(0, 6, 2):
            losses = [q(batch(seed + i)).square().mean() for i in range(2)]
            for i in order:
                losses[i].backward()

    assert_alike(loop)


def test_a_retained_run_and_a_new_one_accumulate() -> None:
    def loop(q: Any) -> None:
        for seed in range(0, 6, 2):
            first = q(batch(seed)).square().mean()
            first.backward(retain_graph=True)
            (first + q(batch(seed + 1)).square().mean()).backward()

    assert_alike(loop)


@pytest.mark.long
def test_two_modules_with_a_common_weight_accumulate() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

    def loop(both: Any) -> None:
        a, b = (memgraph.compile(part, ROOM) if isinstance(both, memgraph.CompiledModule) else part
                for part in (both.a, both.b))  # fmt: skip
        for seed in range(0, 6, 2):
            (a(batch(seed)) - b(batch(seed + 1))).square().mean().backward()

    assert_alike(loop, Both)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each backward whether its run was concurrent."""
    found: list[bool] = []
    backward = StepRun.backward

    def noting(self: StepRun, *args: Any) -> Any:
        found.append(self.is_concurrent)
        return backward(self, *args)

    monkeypatch.setattr(StepRun, "backward", noting)
    return found


def test_a_run_that_was_dropped_or_has_ended_is_not_concurrent(runs: list[bool]) -> None:
    q = memgraph.compile(Body(), ROOM)
    kept = q(batch(0)).sum()
    kept.backward()
    q(batch(1))  # its result goes at once
    gc.collect()
    q(batch(2)).sum().backward()
    assert runs == [False, False]


def test_a_run_that_is_held_is_concurrent(runs: list[bool]) -> None:
    q = memgraph.compile(Body(), ROOM)
    held = q(batch(0)).sum()
    q(batch(1)).sum().backward()
    held.backward()
    assert runs == [True, True]


def test_runs_of_modules_without_shared_parameters_are_not_concurrent(runs: list[bool]) -> None:
    first, second = memgraph.compile(Body(), ROOM), memgraph.compile(Body(), ROOM)
    second(first(batch(0))).sum().backward()
    assert runs == [False, False]


def test_a_forward_without_a_backward_lets_go_of_what_it_has_saved_when_its_outputs_go() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden = torch.nn.functional.gelu(self.first(x))  # which backward reads, and the caller gets
            result = self.last(hidden)
            return result.square().mean(), result, hidden

    net = Net()
    model = memgraph.compile(net, "1MB")
    for _ in range(2):
        model(torch.randn(4, 8))[0].backward()
    outputs = model(torch.randn(4, 8))
    assert len(concurrent_runs.concurrent_runs(net.parameters())) == 1
    del outputs
    assert concurrent_runs.concurrent_runs(net.parameters()) == []
