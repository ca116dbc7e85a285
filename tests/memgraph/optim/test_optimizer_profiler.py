"""The states and the workspace of an update are as forecast, and little less."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph.optim import optimizer_profiler
from memgraph.optim.fake_step import FakeSteps
from memgraph.optim.optimizer_profiler import update_nbytes
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.tensors.parameter_groups import state_tensors
from tests.support.compare import ROOM
from tests.support.optimizers import OPTIMIZERS
from tests.support.streamed_state import batch, chain, loss

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "layers": [(128, 128), (128,), (128, 128), (128,)],
    "alike": [(128, 128)] * 3,
    "mixed": [(30, 100), (30,), (50, 3, 5, 5), (50,), (100, 30), (64, 100), (300, 20), (100,), (100,)],
    "falling": [(size, size) for size in range(96, 48, -8)],
    "small between": [(96, 96), (3,), (80, 80), (2, 2), (64, 64, 2)],
    "one": [(77, 3)],
}


def stepped(optimizer: optim.Optimizer, parameters: Iterable[nn.Parameter], steps: int = 8) -> int:
    """The most bytes of states and workspace together."""
    most = 0
    for p in parameters:
        p.grad = torch.ones_like(p)
    for _ in range(steps):
        there = resident_bytes(state_tensors(optimizer))
        _, allocated = measure_peak(optimizer.step)
        assert allocated is not None
        most = max(most, there + allocated.peak)
    return most


@pytest.mark.long
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_takes_what_was_forecast_and_little_less(name: str, shapes: str) -> None:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in SHAPES[shapes]]
    optimizer = OPTIMIZERS[name](parameters)
    states, workspace = update_nbytes(optimizer)
    most = stepped(optimizer, parameters)
    assert most <= states + workspace <= 1.02 * most


def test_groups_follow_one_another() -> None:
    parameters = [nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    optimizer = optim.AdamW([{"params": [p]} for p in parameters])
    states, workspace = update_nbytes(optimizer)
    assert stepped(optimizer, parameters) <= states + workspace


def test_a_parameter_without_a_gradient_brings_its_neighbours_together() -> None:
    big, small, other = (nn.Parameter(torch.ones(n, n)) for n in (128, 2, 128))
    optimizer = optim.AdamW([big, small, other])
    for trained in ([big, small, other], [big, other]):
        states, workspace = update_nbytes(optimizer, trained)
        optimizer.zero_grad()
        assert stepped(optimizer, trained) <= states + workspace
    assert update_nbytes(optimizer)[1] < update_nbytes(optimizer, [big, other])[1] == update_nbytes(optimizer, [])[1]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": True}, {"fused": True}, {"maximize": True}])
def test_two_steps_of_adam_show_what_seven_do(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (optim.AdamW([torch.nn.Parameter(torch.zeros(64, 9))], **options) for _ in range(2))
    found = update_nbytes(few)
    monkeypatch.setattr("memgraph.optim.optimizer_profiler.distinct_steps", lambda optimizer: 7)
    assert update_nbytes(many) == found


def test_an_optimizer_is_measured_again_only_if_its_options_change(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, plain = [0], optimizer_profiler._step_nbytes

    def counted(*given: Any) -> int:
        steps[0] += 1
        return plain(*given)

    monkeypatch.setattr(optimizer_profiler, "_step_nbytes", counted)
    optimizer = optim.AdamW([torch.nn.Parameter(torch.zeros(size)) for size in (64, 9)])
    found, first = update_nbytes(optimizer), steps[0]
    assert update_nbytes(optimizer) == found and steps[0] == first > 0
    optimizer.param_groups[0]["amsgrad"] = True
    assert update_nbytes(optimizer)[0] > found[0] and steps[0] > first


class Keeping(optim.Optimizer):
    """Momentum whose class keeps tensors from one parameter to the next, or replaces gradients."""

    def __init__(self, parameters: Any, how: str) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.how = how
        self.scratch: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        means = [self.state[p].setdefault("mean", torch.zeros_like(p)) for p in given]
        later = list[tuple[Tensor, Tensor]]()
        for p, mean in zip(given, means, strict=True):
            assert p.grad is not None
            if self.how == "a gradient":
                p.grad = p.grad * 0.9
            mean.mul_(0.9).add_(p.grad)
            if self.how == "all updates":
                later.append((p, mean * 0.5))
            elif self.how == "a buffer for each shape":
                scratch = self.scratch.setdefault(p.shape, torch.empty_like(p))
                p.sub_(torch.mul(mean, 0.01, out=scratch))
            else:
                p.sub_(mean, alpha=0.01)
        for p, update in later:
            p.sub_(update, alpha=0.01)


@pytest.mark.parametrize("how", ["a gradient", "all updates", "a buffer for each shape"])
def test_what_a_class_keeps_from_one_parameter_to_the_next_is_forecast(how: str) -> None:
    module = chain(6)
    optimizer = Keeping(module.parameters(), how)
    model = memgraph.compile(module, ROOM, optimizer=optimizer, loss=loss, time_limit=0)
    for seed in range(3):
        optimizer.zero_grad()
        model(batch(seed)).backward()
        optimizer.step()
    measured = model.plan.measured
    assert measured is not None and measured <= model.plan.peak <= measured + 8192


def test_a_measured_step_over_the_budget_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    module = chain(2)
    optimizer = Keeping(module.parameters(), "all updates")
    monkeypatch.setattr(optimizer_profiler, "fake_steps", lambda *given: FakeSteps(0, 0))
    budget = memgraph.plan(module, batch(), budget=ROOM, optimizer=optimizer, loss=loss, time_limit=0).peak
    model = memgraph.compile(module, budget, optimizer=optimizer, loss=loss, time_limit=0)
    model(batch()).backward()
    with pytest.warns(RuntimeWarning, match=rf"took \d+ bytes, over its budget of {budget}"):
        optimizer.step()
