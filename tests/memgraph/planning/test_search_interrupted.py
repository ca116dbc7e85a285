"""Ctrl-C while a call is planned takes the best plan so far, and the step trains under it."""

from __future__ import annotations

import logging
import signal
from typing import Any

import pytest
import torch

import memgraph
from memgraph.command.app import main
from passes import Trace
from passes.search import optimize as optimizing
from tests.support.models import batch, net

FACTORY = """
import torch
from torch import nn

def setup():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)])
    return model, torch.randn(128, 64)
"""


@pytest.fixture
def pressing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The user presses Ctrl-C once the linear program was rounded; holds the number of times."""
    pytest.importorskip("highspy")
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr("memgraph.planning.search.cached_plan", lambda *_: None)
    widen, pressed = optimizing.Optimizer._widen, list[int]()

    def interrupted(self: Any, *given: Any) -> None:
        widen(self, *given)
        if self.incumbent.best is not None and not pressed:
            pressed.append(1)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(optimizing.Optimizer, "_widen", interrupted)
    return pressed


def test_a_step_is_trained_under_the_best_plan_until_then(
    pressing: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    room = memgraph.plan(net(), batch(), budget="1GB").peak
    model, eager = memgraph.compile(net(), room - 50_000, offload=None), net()
    with caplog.at_level(logging.WARNING, "memgraph"):
        for each in (model, eager):
            torch.manual_seed(0)
            each(batch()).sum().backward()
    assert pressing
    assert "interrupted: the search ends with the best plan so far" in caplog.text
    report = model.plan
    assert report.choice.interrupted and report.measured is not None
    assert report.measured <= report.peak <= report.budget
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


@pytest.mark.long
def test_the_plan_of_an_interrupted_search_is_not_used_in_the_next_process(
    pressing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Trace] = []
    monkeypatch.setattr("memgraph.planning.search.remember", lambda trace, *_: kept.append(trace))
    room = memgraph.plan(net(), batch(), budget="1GB").peak
    kept.clear()
    memgraph.plan(net(), batch(), budget=room - 50_000, offload=None)
    assert pressing and not kept
    memgraph.plan(net(), batch(), budget=room - 50_000, offload=None)
    assert kept


def test_the_command_prints_that_plan_with_exit_code_0(
    pressing: list[int], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "interrupted_factory.py").write_text(FACTORY)
    target = f"{tmp_path}/interrupted_factory.py:setup"
    assert main(["explain", target, "--json"]) == 0
    budget = memgraph.Report.from_json(capsys.readouterr().out).peak - 100_000
    assert main(["plan", target, "--budget", str(budget)]) == 0
    assert pressing
    assert "planning was interrupted" in capsys.readouterr().out


def test_an_interrupt_once_a_plan_is_chosen_leaves_calls_that_add_for_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pressed(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    room = memgraph.plan(net(), batch(), budget="1GB").peak
    monkeypatch.setattr("memgraph.planning.later_step.find_or_plan", pressed)
    report = memgraph.plan(net(), batch(), budget=room - 50_000, offload=None)
    assert report.plan and report.peak <= report.budget
    assert "calls that add to gradients are not planned yet" in caplog.text
