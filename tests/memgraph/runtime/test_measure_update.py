"""The first real update is measured with its step, and both are within the forecast."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph.optim.offloaded_update import OffloadedUpdate
from memgraph.system.locks import PLANNING_LOCK
from tests.support.optimizers import OPTIMIZERS, ROOM, batch, net, square, step


def heavy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))


def test_the_forecast_of_a_step_whose_peak_is_the_update_is_tight() -> None:
    module, x = heavy(), torch.randn(8, 256)
    optimizer = optim.AdamW(module.parameters())
    compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)
    step(compiled, optimizer, x)
    report = compiled.plan
    assert report.forecast.trace.ops[report.forecast.peak_index].name == "optimizer_step"
    assert report.measured is not None
    assert report.measured <= report.peak <= report.measured + 64


def test_a_budget_error_lists_the_workspace_of_the_update() -> None:
    module = heavy()
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(module, torch.randn(8, 256), budget=1000, optimizer=optim.AdamW(module.parameters()), loss=square)
    assert "Peak memory is at optimizer_step (AdamW.step)" in str(caught.value)
    # At the smallest budget it runs in windows.
    window = OffloadedUpdate(optim.AdamW(module.parameters())).peak_nbytes(list(module.parameters()))
    assert f"{window} bytes  workspace  of optimizer_step itself" in str(caught.value)
    listed = re.findall(r"^ +(\d+) bytes  ", str(caught.value).partition("No plan")[0], re.MULTILINE)
    smallest = re.search(r"smallest budget for which a plan was found is (\d+)", str(caught.value))
    assert smallest is not None
    assert sum(map(int, listed)) == int(smallest[1])


def test_the_update_is_measured_as_well() -> None:
    module, x = heavy(), torch.randn(8, 256)
    optimizer = optim.AdamW(module.parameters())
    compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)
    compiled(x).backward()
    before = compiled.plan.measured
    optimizer.step()
    after = compiled.plan.measured
    assert before is not None
    assert after is not None
    assert before < after <= compiled.plan.peak
    assert "step" not in vars(optimizer)
    optimizer.zero_grad()
    step(compiled, optimizer, x)
    assert compiled.plan.measured == after


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_measured_with_the_update_is_within_the_forecast(name: str) -> None:
    module = net()
    optimizer = OPTIMIZERS[name](module.parameters())
    compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)
    for _ in range(2):  # the second accumulates
        compiled(batch()).backward()
    optimizer.step()
    reports = [planned.report for planned in compiled._kept.steps]
    assert len(reports) == 2
    assert all(report.measured is not None and report.measured <= report.peak for report in reports)


def test_an_update_that_fails_is_not_measured_and_leaves_the_optimizer_as_it_was() -> None:
    module = net()
    optimizer = optim.AdamW(module.parameters())
    compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)
    compiled(batch()).backward()
    before = compiled.plan.measured

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    hook.remove()
    assert "step" not in vars(optimizer)
    optimizer.step()
    assert compiled.plan.measured == before
    assert not PLANNING_LOCK._is_owned()  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", [True, False])
def test_a_schedule_goes_on_beside_the_measurement(first: bool) -> None:
    module = net()
    optimizer = optim.SGD(module.parameters(), lr=1.0)
    make: Callable[[], Any] = lambda: optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    schedule = make() if first else None
    compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)
    compiled(batch()).backward()
    schedule = schedule or make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.step()
            schedule.step()
    assert schedule.get_last_lr() == [0.125]
    assert compiled.plan.measured is not None


def test_a_closure_runs_the_model_and_is_not_measured() -> None:
    module = net()
    optimizer: Any = optim.SGD(module.parameters(), lr=0.1)
    compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = compiled(batch())
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak


def test_a_measured_optimizer_is_freed_with_its_states_without_a_collection_of_garbage() -> None:
    def trained() -> list[weakref.ref[Any]]:
        module = heavy()
        optimizer = optim.AdamW(module.parameters())
        compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)
        step(compiled, optimizer, torch.randn(8, 256))
        return [weakref.ref(optimizer), *(weakref.ref(state["exp_avg"]) for state in optimizer.state.values())]

    gc.collect()
    gc.disable()
    try:
        assert not [reference for reference in trained() if reference() is not None]
    finally:
        gc.enable()
