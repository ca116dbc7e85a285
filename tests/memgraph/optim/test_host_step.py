"""States that live on the host are updated there: equal to the bit where kernels are, and no wait is for nothing.

The device is RAM that is late (`tests/support/late_device.py`), so the host has its kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph.optim import host_step, offloaded_update, optimizer_profiler
from memgraph.optim.host_step import host_groups
from memgraph.optim.offloaded_update import OffloadedStates, OffloadedUpdate
from memgraph.optim.optimizer_profiler import OptimizerProfiler
from memgraph.optim.trained_parameters import movable_states
from memgraph.optim.update_cost import STATE
from memgraph.optim.windowed_update import WindowedUpdate
from memgraph.planning import target
from memgraph.storage.mapped_storage import is_offloaded
from memgraph.storage.pinned_pool import PinnedPool
from memgraph.storage.pinned_storage import PinnedBufferAllocator
from memgraph.storage.pinned_tier import copy_streams, extra_streams
from memgraph.storage.places import Places
from memgraph.storage.transfer import offload_tensors
from passes import Stream
from tests.support.late_device import Late
from tests.support.streamed_state import OPTIMIZERS, Twins, batch, chain, facts, far, least, loss, same, streamed, train

CPU = torch.device("cpu")
FUSED = ("adamw", "adam", "momentum", "adagrad")
ALL, SOME = 1e6, 60.0  # bytes of states a microsecond, where the links take 100 of anything
WINDOW = 1 << 16
SHORT = partial(chain, 3)


@pytest.fixture(name="rate")
def _rate(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Says how fast the host steps."""
    return lambda rate: monkeypatch.setattr(offloaded_update, "host_update_rate", lambda *_: rate)


@pytest.fixture(name="host")
def _host(monkeypatch: pytest.MonkeyPatch, late: Late) -> Late:
    """The late device, which does not do what the host does; its queues for the host's own copies have names."""
    for queues, names in (
        (copy_streams(late, CPU), ("out", "back")),
        (extra_streams(late, CPU), ("leaving", "coming")),
    ):
        for queue, name in zip(queues, names, strict=True):
            queue.name = name

    def by_itself(work: Callable[[WindowedUpdate, int], Any]) -> Callable[[WindowedUpdate, int], Any]:
        def worked(update: WindowedUpdate, at: int) -> Any:
            with late.hosting(at >= update.first_host_window):
                return work(update, at)

        return worked

    for name in ("_fill", "_compute", "_finish"):
        monkeypatch.setattr(WindowedUpdate, name, by_itself(getattr(WindowedUpdate, name)))
    return late


@cache
def budget(kind: str, share: float = 1.0) -> int:
    """About the smallest, whatever the host may do, or `share` times as much."""
    return int(least(kind, SHORT) * share)


def twins_of(kind: str, share: float = 1.0) -> Twins:
    return Twins(SHORT, budget=budget(kind, share), optimizer=made(kind), host_update=True)


@cache
def planned(**wishes: Any) -> memgraph.Report:
    """As the planner is when it is asked first."""
    model = SHORT()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return memgraph.plan(model, batch(), budget=budget("adamw"), optimizer=optimizer, loss=loss, time_limit=0, **wishes)


def made(kind: str) -> Callable[[nn.Module], optim.Optimizer]:
    """By the kernel that the host takes, on both."""
    fused = {"fused": True} if kind in FUSED else {}
    return lambda model: OPTIMIZERS[kind](model.parameters(), **fused)


def there(report: memgraph.Report) -> set[str]:
    """Return the parameters that the host updates."""
    return {said.value for said in report.plan if isinstance(said, Stream) and said.on}


# --- a planned step


@pytest.mark.long
@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize(("kind", "speed"), [("adamw", ALL), ("adamw", SOME), ("rmsprop", ALL)])
def test_training_equals_the_plain_optimizers_however_late_the_device_is(
    kind: str, speed: float, host: Late, rate: Callable[[float], None]
) -> None:
    rate(speed)
    twins = twins_of(kind)
    twins.train(2)
    for seed in range(2):
        host.seed(seed)
        with host.noting():
            twins.train(1)
    states = {said.value for said in twins.model.plan.plan if said.value.startswith(STATE)}
    found = there(twins.model.plan)
    assert found and (found == states if speed == ALL else found < states)
    assert far(twins.module, twins.ours) == {"parameter", "gradient", "state"}


@pytest.mark.long
@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize(
    "missing",
    [(), ("host for compute", "host for out", "host for back"), ("host for leaving",), ("host for coming",),
     ("leaving for coming",)],
    ids=lambda missing: ", ".join(missing) or "none",
)  # fmt: skip
def test_without_any_one_of_its_waits_it_goes_wrong(
    missing: tuple[str, ...], host: Late, rate: Callable[[float], None]
) -> None:
    """Lending a window to the host waits for the copies of the last step, which are most of the waits."""
    rate(ALL)
    twins = twins_of("momentum", 1.2)
    twins.train(2)
    assert any(is_offloaded(parameter) for parameter in twins.module.parameters())
    assert any(not is_offloaded(p) and p.nbytes > WINDOW for p in twins.module.parameters())
    host.deaf, host.idle = frozenset((a, b) for a, _, b in (pair.partition(" for ") for pair in missing)), True
    host.slow = frozenset(waited for _, waited in host.deaf)
    for seed in range(3):
        host.seed(seed)
        twins.train_plain(2)
        with host.noting():
            for turn in range(2):
                train(twins.model, twins.ours, lambda model, x: model(x), batch(turn))
        if not same(facts(twins.model, twins.ours), facts(twins.plain, twins.theirs)):
            break
    else:
        assert not missing
        return
    assert missing


@pytest.mark.usefixtures("small_windows", "host")
def test_loaded_state_is_offloaded_again(rate: Callable[[float], None]) -> None:
    rate(ALL)
    twins = twins_of("adamw")
    twins.train(2)
    for model, optimizer in ((twins.plain, twins.theirs), (twins.model, twins.ours)):
        model.load_state_dict({name: value.clone() * 0.5 for name, value in model.state_dict().items()})
        optimizer.load_state_dict(optimizer.state_dict())
    twins.train(2)


@pytest.mark.usefixtures("small_windows", "host")
def test_a_scaler_is_heard(rate: Callable[[float], None]) -> None:
    rate(ALL)
    twins = twins_of("adamw")
    scalers = {
        id(optimizer): torch.amp.GradScaler("cpu", init_scale=1024.0) for optimizer in (twins.ours, twins.theirs)
    }

    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad()
        value: Tensor = run(model, batch())
        scaler = scalers[id(optimizer)]
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        return value.detach()

    twins.train(3, step)
    assert there(twins.model.plan)


# --- what is asked for


@pytest.mark.usefixtures("small_windows", "host")
def test_nothing_is_updated_there_unless_it_is_asked_for(rate: Callable[[float], None]) -> None:
    rate(ALL)
    report = planned()
    assert any(isinstance(said, Stream) for said in report.plan) and not there(report)
    assert report.machine.streaming.host_update_rate == 0.0


@pytest.mark.usefixtures("small_windows", "host")
def test_a_saved_plan_says_it_and_wants_to_be_asked(rate: Callable[[float], None]) -> None:
    rate(ALL)
    report = planned(host_update=True)
    again = planned(host_update=True, plan=report.to_json())
    assert again.plan == report.plan and there(again)
    with pytest.raises(memgraph.PlanError, match="updates states on the host, which needs host_update=True"):
        planned(plan=report.to_json())


@pytest.mark.usefixtures("small_windows", "host")
def test_behind_a_cpu_nothing_is_different(monkeypatch: pytest.MonkeyPatch, rate: Callable[[float], None]) -> None:
    rate(ALL)
    monkeypatch.setattr(target, "open_places", lambda tiers, device, folder, *_: Places({"disk": folder}))
    asked = planned.__wrapped__(host_update=True)
    assert any(isinstance(said, Stream) for said in asked.plan)
    assert not there(asked) and asked.machine.streaming.host_update_rate == 0.0


def test_what_is_not_built_is_refused() -> None:
    model = chain(1)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(ValueError, match="host_update=True needs the optimizer"):
        streamed(model, 1, host_update=True)
    with pytest.raises(ValueError, match="fuse_update=True updates in backward: give one of them"):
        streamed(model, 1, optimizer=optimizer, host_update=True, fuse_update=True)


@pytest.mark.usefixtures("small_windows", "host")
def test_the_report_says_what_is_updated_there(rate: Callable[[float], None]) -> None:
    rate(ALL)
    report = planned(host_update=True)
    (line,) = (line for line in str(report).splitlines() if line.startswith("update there"))
    assert line.split()[2] == "state" and line.endswith("offloaded to host, and is updated there")
    assert str(report.machine).endswith("updates states at 1000000 MB/s")


# --- how fast the host is


def test_a_window_is_stepped_once_and_its_time_is_known_from_then_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs: list[object] = []

    def shortest(run: Callable[[], object], *_: object) -> float:
        runs.append(run())
        return 8.0

    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(optimizer_profiler, "shortest_us", shortest)
    optimizer = OPTIMIZERS["adamw"](chain(2).parameters())
    parts, elements = movable_states(optimizer), (1 << 18) // 16
    for _ in range(3):
        monkeypatch.setattr(optimizer_profiler, "_update_times", {})  # as in another process
        assert host_step.host_update_rate(optimizer, parts, 1 << 18) == pytest.approx(8 * elements / 8.0)
    assert len(runs) == 1
    assert host_step.host_update_rate(optimizer, {}, 1 << 18) == 0.0


def on_host(optimizer: optim.Optimizer) -> dict[str, Any]:
    return host_groups(optimizer, optimizer.param_groups)[0]


def test_the_kernel_for_processors_runs_where_nothing_else_was_chosen() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    for options, fused in (
        ({}, True), ({"fused": False}, False), ({"foreach": True}, None), ({"foreach": False}, True),
    ):  # fmt: skip
        assert on_host(optim.AdamW(parameters, **options))["fused"] is fused  # type: ignore[arg-type]
    low = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]
    assert on_host(optim.SGD(low))["fused"] is None
    assert on_host(optim.Adam([nn.Parameter(torch.zeros(3, dtype=torch.cfloat))]))["fused"] is None
    assert "fused" not in on_host(optim.RMSprop(parameters))


# --- one update


def shapes(dtype: torch.dtype) -> list[nn.Parameter]:
    """Return parameters; some take several windows, and one is transposed."""
    torch.manual_seed(0)
    whole, wide = torch.randn(70, 90, dtype=dtype), torch.randn(150, 130, dtype=dtype)
    return [nn.Parameter(whole), nn.Parameter(wide.t()), nn.Parameter(torch.randn(17, dtype=dtype))]


@pytest.mark.parametrize("places", ["all far", "all here", "parameters here", "gradients here"])
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (partial(optim.AdamW, lr=0.01), torch.float32),
        (partial(optim.Adam, lr=0.01, weight_decay=0.1), torch.float32),
        (partial(optim.Adagrad, lr=0.01), torch.float32),
        (partial(optim.AdamW, lr=0.01, amsgrad=True), torch.bfloat16),
        (partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True), torch.float32),
        (partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.9), torch.float32),
        (partial(optim.NAdam, lr=0.01), torch.float64),
    ],
    ids=["AdamW", "Adam", "Adagrad", "AdamW bf16", "SGD", "RMSprop", "NAdam"],
)
def test_wherever_tensors_are_the_host_steps_as_its_kernel_does(
    make: Callable[..., optim.Optimizer], dtype: torch.dtype, places: str, pool: PinnedPool
) -> None:
    host = PinnedBufferAllocator(CPU, Late(0), pool)
    theirs = shapes(dtype)
    ours = [nn.Parameter(copy.deepcopy(parameter.data)) for parameter in theirs]
    optimizer = make(ours)
    plain = make(theirs, fused=True) if "fused" in optimizer.defaults else make(theirs)
    if places in ("all far", "gradients here"):
        for parameter, home in zip(
            ours, offload_tensors([parameter.detach() for parameter in ours], host), strict=True
        ):
            parameter.data = home
    for seed in range(3):
        torch.manual_seed(seed)
        for our, their in zip(ours, theirs, strict=True):
            their.grad = torch.empty_like(their).normal_()
            our.grad = their.grad.clone()
        if places in ("all far", "parameters here"):
            for parameter, home in zip(
                ours, offload_tensors([p.grad for p in ours if p.grad is not None], host), strict=True
            ):
                parameter.grad = home
        before = [parameter._version for parameter in ours]
        update = WindowedUpdate(optimizer, WINDOW, lambda _: True, host, on_host=lambda _: True)
        assert update.first_host_window == 0 and len(update.windows) > 2
        with torch.no_grad():
            update.run()
        plain.step()
        for our, their, version in zip(ours, theirs, before, strict=True):
            assert our._version > version
            assert torch.equal(our, their)
            states, known = optimizer.state[our], plain.state[their]
            assert states.keys() == known.keys()
            for key, value in known.items():
                assert torch.equal(states[key], value) if isinstance(value, Tensor) else states[key] == value
                assert is_offloaded(states[key]) or not isinstance(value, Tensor) or not value.dim()
        del update
        assert not pool.in_use


@pytest.mark.parametrize("what", ["a parameter with gaps", "a gradient that lies otherwise"])
def test_what_the_fused_kernel_would_take_for_something_else_is_stepped_on_the_device(
    what: str, pool: PinnedPool
) -> None:
    parameter = nn.Parameter(torch.randn(40, 60)[:, ::2] if "gaps" in what else torch.randn(30, 40).t())
    plain = nn.Parameter(parameter.detach().clone())
    parameter.grad, plain.grad = (torch.arange(1200.0).view(40, 30) for _ in range(2))
    optimizer, other = optim.AdamW([parameter]), optim.AdamW([plain])
    update = WindowedUpdate(
        optimizer, WINDOW, lambda _: True, PinnedBufferAllocator(CPU, Late(0), pool), on_host=lambda _: True
    )
    assert update.host_step is None and update.first_host_window == len(update.windows)
    with torch.no_grad():
        update.run()
    other.step()
    assert torch.equal(parameter, plain)


def test_a_parameter_that_is_trained_later_than_others_begins_as_they_did(pool: PinnedPool) -> None:
    ours = [nn.Parameter(torch.randn(40, 30)) for _ in range(2)]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizer = optim.SGD(ours, lr=0.1, momentum=0.9)
    plain = [optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True) for parameter in theirs]
    for trained in (1, 2, 2):
        for i in range(trained):
            ours[i].grad, theirs[i].grad = torch.ones(40, 30), torch.ones(40, 30)
            plain[i].step()
        update = WindowedUpdate(
            optimizer, WINDOW, lambda _: True, PinnedBufferAllocator(CPU, Late(0), pool), on_host=lambda _: True
        )
        assert len(update.windows) == 1
        with torch.no_grad():
            update.run()
        assert all(map(torch.equal, ours, theirs))


def test_a_number_that_the_optimizer_keeps_on_the_device_is_put_there(
    pool: PinnedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OptimizerProfiler, "scalar_devices", lambda *_: {"step": torch.device("meta")})
    parameter = nn.Parameter(torch.ones(40, 30))
    parameter.grad = torch.ones(40, 30)
    optimizer = optim.AdamW([parameter])
    update = WindowedUpdate(
        optimizer, WINDOW, lambda _: True, PinnedBufferAllocator(CPU, Late(0), pool), on_host=lambda _: True
    )
    with torch.no_grad():
        update.run()
    assert optimizer.state[parameter]["step"].is_meta and is_offloaded(optimizer.state[parameter]["exp_avg"])


def test_a_plan_that_replaces_another_sets_what_the_host_updates(pool: PinnedPool) -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    whole = OffloadedUpdate(optim.AdamW(parameters), location=PinnedBufferAllocator(CPU, Late(0), pool))
    first = OffloadedStates(whole, dict.fromkeys(parameters, ""), tuple(parameters))
    first.activate()
    assert whole.host_owners == set(parameters) and first.is_active
    second = OffloadedStates(whole, dict.fromkeys(parameters, ""), (parameters[1],))
    first.deactivate(second.owners)
    assert not second.is_active
    second.activate()
    assert whole.host_owners == {parameters[1]} and second.is_active
