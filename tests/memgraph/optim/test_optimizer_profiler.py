"""The states and the workspace of an update are as forecast, and little less."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn, optim

from memgraph.optim import optimizer_profiler
from memgraph.optim.optimizer_profiler import update_nbytes
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.tensors.parameter_groups import state_tensors
from tests.support.optimizers import OPTIMIZERS

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
