"""With an optimizer, its states and its update are part of the forecast, to the byte, and of the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import memgraph
from memgraph.optim.optimizer_profiler import update_nbytes
from memgraph.profile import op_profiler
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.tensors.parameter_groups import state_tensors
from tests.support.optimizers import OPTIMIZERS, ROOM, batch, net, square, step


def forecast_states(report: memgraph.Report) -> int:
    return int(report.forecast.by_kind["state"].max())


def most_measured(module: nn.Module, optimizer: optim.Optimizer, compiled: nn.Module, steps: int) -> int:
    """The most bytes that some whole steps had on the device, once states are there."""
    x, most = batch(), 0
    for _ in range(steps):
        there = resident_bytes([*module.parameters(), x, *state_tensors(optimizer)])
        _, allocated = measure_peak(lambda: step(compiled, optimizer, x))
        assert allocated is not None
        most = max(most, there + allocated.peak)
    return most


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_forecast_of_the_states_is_what_they_take(name: str) -> None:
    module = net()
    del module.frozen
    optimizer = OPTIMIZERS[name](module.parameters())
    compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)
    for _ in range(2):
        step(compiled, optimizer, batch())
    assert forecast_states(compiled.plan) == resident_bytes(state_tensors(optimizer))


@pytest.mark.parametrize("name", ["Adagrad", "AdamW"])
def test_states_of_frozen_parameters_are_counted_where_there_are_some(name: str) -> None:
    module = net()
    optimizer = OPTIMIZERS[name](module.parameters())
    square(module(batch())).backward()
    optimizer.step()
    module[0].requires_grad_(False)  # type: ignore[index]
    report = memgraph.plan(module, batch(), budget=ROOM, optimizer=optimizer, loss=square)
    assert forecast_states(report) >= resident_bytes(state_tensors(optimizer))


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_planning_leaves_the_optimizer_as_it_was(name: str) -> None:
    module = net()
    optimizer = OPTIMIZERS[name](module.parameters())
    before = optimizer.state_dict()
    values = [p.detach().clone() for p in module.parameters()]
    memgraph.plan(module, batch(), budget=ROOM, optimizer=optimizer)
    assert str(optimizer.state_dict()) == str(before)
    assert [p.grad for p in module.parameters()] == [None] * len(values)
    assert all(map(torch.equal, values, module.parameters()))


@pytest.mark.long
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_whole_step_is_measured_within_the_forecast(name: str) -> None:
    module = net()
    optimizer = OPTIMIZERS[name](module.parameters())
    compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)
    step(compiled, optimizer, batch())
    assert most_measured(module, optimizer, compiled, 7) <= compiled.plan.peak


def test_a_whole_step_is_within_the_forecast_where_parameters_are_of_one_size() -> None:
    module = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    optimizer = optim.AdamW(module.parameters())
    compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)
    step(compiled, optimizer, batch())
    assert most_measured(module, optimizer, compiled, 2) <= compiled.plan.peak


def test_a_whole_step_keeps_to_a_budget_that_takes_a_plan() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Softplus()) for _ in range(4)])
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(300, 32)
    needed = memgraph.plan(module, x, budget=ROOM, optimizer=optimizer, loss=square).peak
    budget = needed * 3 // 4
    compiled = memgraph.compile(module, budget, optimizer=optimizer, loss=square, offload=None)
    step(compiled, optimizer, x)
    assert compiled.plan.plan
    there = resident_bytes([*module.parameters(), x, *state_tensors(optimizer)])
    _, allocated = measure_peak(lambda: step(compiled, optimizer, x))
    assert allocated is not None
    assert there + allocated.peak <= compiled.plan.peak <= budget


def test_states_are_counted_in_the_smallest_budget() -> None:
    module = net()
    smallest = []
    for optimizer in (None, optim.AdamW(module.parameters())):
        with pytest.raises(memgraph.BudgetError) as caught:
            memgraph.plan(module, batch(), budget=1000, optimizer=optimizer, loss=square)
        smallest.append(caught.value.smallest)
    states = 2 * sum(p.nbytes for p in module.parameters() if p.requires_grad)
    assert smallest[1] >= smallest[0] + states


def test_the_update_is_the_last_op_and_the_report_says_what_it_takes() -> None:
    module = net()
    report = memgraph.plan(module, batch(), budget=ROOM, optimizer=optim.AdamW(module.parameters()), loss=square)
    update = report.forecast.trace.ops[-1]
    assert (update.fn, update.phase) == ("AdamW.step", "update")
    assert update.workspace > 0
    assert "no optimizer was given" not in str(report)
    assert "state" in str(report)


def test_groups_with_settings_of_their_own_are_counted_each_by_its_own() -> None:
    module = net()
    parts: list[dict[str, Any]] = [
        {"params": module[0].parameters(), "momentum": 0.9},  # type: ignore[index]
        {"params": module[2].parameters()},  # type: ignore[index]
    ]
    states, _ = update_nbytes(optim.SGD(parts, lr=0.1))
    assert states == sum(p.nbytes for p in module[0].parameters())  # type: ignore[index]


def test_states_that_are_there_already_are_not_counted_twice() -> None:
    module = net()
    optimizer = optim.Adam(module.parameters())
    square(module(batch())).backward()
    optimizer.step()
    optimizer.zero_grad()
    report = memgraph.plan(module, batch(), budget=ROOM, optimizer=optimizer, loss=square)
    assert forecast_states(report) == resident_bytes(state_tensors(optimizer))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_states_of_other_dtypes(dtype: torch.dtype) -> None:
    module = net().to(dtype)
    optimizer = optim.AdamW(module.parameters())
    compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)
    step(compiled, optimizer, batch().to(dtype))
    assert forecast_states(compiled.plan) == resident_bytes(state_tensors(optimizer))


def test_hooks_and_schedules_of_the_optimizer_are_not_run_by_planning() -> None:
    module = net()
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *args: called.append(1))
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    memgraph.plan(module, batch(), budget=ROOM, optimizer=optimizer, loss=square)
    assert called == []
    assert schedule.get_last_lr() == [0.1]


def test_an_optimizer_that_wants_a_closure_is_refused_by_name() -> None:
    module = net()
    with pytest.raises(
        TypeError, match=r"LBFGS can't be planned, since its step can't be tried on a dense gradient: .*closure"
    ):
        memgraph.compile(module, ROOM, optimizer=optim.LBFGS(module.parameters()))(batch())


def test_an_optimizer_of_sparse_gradients_is_refused_by_name() -> None:
    module = net()
    with pytest.raises(TypeError, match="SparseAdam can't be planned"):
        memgraph.compile(module, ROOM, optimizer=optim.SparseAdam(list(module.parameters())))(batch())


def test_planning_under_a_profiler_finds_the_same_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    optimizer = optim.AdamW(module.parameters())

    def workspaces() -> list[int]:
        report = memgraph.plan(
            module, batch(), budget=ROOM, optimizer=optimizer, loss=lambda out: out.sort(-1)[0].square().mean()
        )
        return [op.workspace for op in report.forecast.trace.ops]

    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(op_profiler, "_known", {})
    expected = workspaces()
    assert sum(map(bool, expected)) > 1
    monkeypatch.setattr(op_profiler, "_known", {})
    with torch.autograd.profiler.profile():
        assert workspaces() == expected
