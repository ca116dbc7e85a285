"""Threads plan one after the other and don't share fake tensors; planned steps don't wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.capture.capture import capture
from memgraph.capture.sizes import size_capture
from memgraph.planning import capture_step
from memgraph.system.locks import PLANNING_LOCK, capturing
from tests.support.forks import forked

ROOM = "1GB"


def net(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)])


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(5))


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Run each function in its own thread; return the results."""
    begin, found, failed = threading.Barrier(len(works)), dict[int, Any](), list[BaseException]()

    def run(place: int, work: Callable[[], Any]) -> None:
        begin.wait()
        try:
            found[place] = work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [found[place] for place in range(len(works))]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))


def test_first_calls_of_several_modules_at_once() -> None:
    modules = [net() for _ in range(4)]
    compiled = [memgraph.compile(module, ROOM) for module in modules]
    found = at_once(*[partial(gradients, one, batch()) for one in compiled])
    expected = gradients(modules[0], batch())
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, expected, strict=True))
    assert all(one.plan.measured is not None and one.plan.measured <= one.plan.peak for one in compiled)


@pytest.mark.long
def test_first_calls_of_one_module_at_once() -> None:
    module = net()
    compiled = memgraph.compile(module, ROOM)
    found = at_once(*[partial(gradients, compiled, batch(rows)) for rows in (4, 8, 4, 12)])
    for rows, one in zip((4, 8, 4, 12), found, strict=True):
        assert all(map(torch.equal, one, gradients(module, batch(rows))))


def test_a_planned_call_waits_while_another_thread_captures_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    compiled = memgraph.compile(module, ROOM)
    expected = gradients(compiled, batch())
    inside, never = threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        # As capture does: other tensors in the place of the parameters.
        kept, module[0][0].weight = module[0][0].weight, nn.Parameter(torch.zeros(32, 32))  # type: ignore[index]
        inside.set()
        never.wait(0.2)
        module[0][0].weight = kept  # type: ignore[index]
        return capture(*args, **kwargs)

    for owner in (capture_step, size_capture):
        monkeypatch.setattr(owner, "capture", slow)

    def second() -> tuple[Any, Any]:
        inside.wait()
        return gradients(compiled, batch()), compiled.state_dict()["0.0.weight"]

    _, (found, weight) = at_once(lambda: gradients(compiled, batch(5)), second)
    assert all(map(torch.equal, found, expected))
    assert weight.data_ptr() == module[0][0].weight.data_ptr()  # type: ignore[index]


def test_a_planned_step_does_not_wait_for_another_module() -> None:
    compiled = memgraph.compile(net(), ROOM)
    gradients(compiled, batch())
    done, other = threading.Event(), net()

    def plan() -> bool:
        with capturing(other):
            return done.wait(60)

    def step() -> None:
        gradients(compiled, batch())
        done.set()

    assert at_once(plan, step)[0]


def test_a_plain_module_in_another_thread_does_not_disturb_a_capture() -> None:
    compiled, stop = memgraph.compile(net(), ROOM), threading.Event()

    def plain() -> int:
        model, count = net(), 0
        while not stop.is_set():
            model(batch())
            count += 1
        return count

    def plan() -> str:
        try:
            compiled(batch()).sum().backward()
            return str([op.where for op in compiled.plan.forecast.trace.ops])
        finally:
            stop.set()

    alone = memgraph.plan(net(), batch(), budget=ROOM)
    assert at_once(plan, plain)[0].split() == str([op.where for op in alone.forecast.trace.ops]).split()


def test_a_forked_child_plans_though_another_thread_was_planning() -> None:
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with PLANNING_LOCK:
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    child = forked(lambda: PLANNING_LOCK.acquire(timeout=30))
    done.set()
    thread.join()
    assert child.code() == 0
