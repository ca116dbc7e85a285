"""With an optimizer, its states and its update are part of the forecast, to the byte, and of the budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph import probe
from memgraph.alone import ALONE
from memgraph.peak import measured, resident_bytes
from memgraph.update import state_tensors, update_nbytes

ROOM = "1GB"
Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01),
    "RMSprop centered": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


def net() -> nn.Module:
    """Parameters of several sizes, and a frozen one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 64))
    module.register_parameter("frozen", nn.Parameter(torch.ones(7), requires_grad=False))
    return module


def square(result: Tensor) -> Tensor:
    return result.square().mean()


def batch() -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(5))


def step(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()


def forecast_states(report: memgraph.Report) -> int:
    return int(report.forecast.by_kind["state"].max())


def most_measured(module: nn.Module, optimizer: optim.Optimizer, compiled: nn.Module, steps: int) -> int:
    """The most bytes that some whole steps had on the device, once states are there."""
    x, most = batch(), 0
    for _ in range(steps):
        there = resident_bytes([*module.parameters(), x, *state_tensors(optimizer)])
        _, allocated = measured(lambda: step(compiled, optimizer, x))
        assert allocated is not None
        most = max(most, there + allocated.peak)
    return most


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
    _, allocated = measured(lambda: step(compiled, optimizer, x))
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


def test_planning_under_a_profiler_warns_and_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    optimizer = optim.AdamW(module.parameters())

    def workspaces() -> list[int]:
        report = memgraph.plan(
            module, batch(), budget=ROOM, optimizer=optimizer, loss=lambda out: out.sort(-1)[0].square().mean()
        )
        return [op.workspace for op in report.forecast.trace.ops]

    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(probe, "_known", {})
    expected = workspaces()
    assert sum(map(bool, expected)) > 1
    monkeypatch.setattr(probe, "_known", {})
    with torch.autograd.profiler.profile(), pytest.warns(RuntimeWarning, match="a profiler is running"):
        workspaces()
    assert workspaces() == expected


# --- tight


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
        _, allocated = measured(optimizer.step)
        assert allocated is not None
        most = max(most, there + allocated.peak)
    return most


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


def heavy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))


def test_the_forecast_of_a_step_whose_peak_is_the_update_is_tight() -> None:
    module, x = heavy(), torch.randn(8, 256)
    optimizer = optim.AdamW(module.parameters())
    compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)
    step(compiled, optimizer, x)
    report = compiled.plan
    assert report.forecast.trace.ops[report.forecast.at].name == "optimizer_step"
    assert report.measured is not None
    assert report.measured <= report.peak <= report.measured + 64


def test_a_budget_error_lists_the_workspace_of_the_update() -> None:
    module = heavy()
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(module, torch.randn(8, 256), budget=1000, optimizer=optim.AdamW(module.parameters()), loss=square)
    assert "It needs most at optimizer_step (AdamW.step)" in str(caught.value)
    _, workspace = update_nbytes(optim.AdamW(module.parameters()))
    assert f"{workspace} bytes  workspace  of optimizer_step itself" in str(caught.value)


# --- the first real update is measured


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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_measured_with_the_update_is_within_the_forecast(name: str) -> None:
    module = net()
    optimizer = OPTIMIZERS[name](module.parameters())
    compiled = memgraph.compile(module, ROOM, optimizer=optimizer, loss=square)
    for _ in range(2):  # the second accumulates
        compiled(batch()).backward()
    optimizer.step()
    reports = [planned.report for planned in compiled._steps.values()]
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
    assert not ALONE._is_owned()  # type: ignore[attr-defined]


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
    optimizer = optim.SGD(module.parameters(), lr=0.1)
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
