"""Under torch's modes (autocast, no_grad, checkpoint, anomaly detection) a compiled module does what the plain one does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memgraph
from memgraph.planning import search
from tests.support.compare import ROOM, Fact, assert_alike, batch, steps, tight
from tests.support.forced_plans import all_given_up
from tests.support.models import Plain, Running


@pytest.mark.parametrize("make", [Running, Plain])
def test_autocast_to_bfloat16(make: Any) -> None:
    assert_alike(cast, make)


@pytest.mark.long
@pytest.mark.parametrize("make", [Running, Plain])
def test_autocast_to_bfloat16_when_all_is_given_up(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "make_plan", all_given_up)
    assert_alike(cast, make)


def test_autocast_to_bfloat16_is_within_the_forecast() -> None:
    """With statistics that are large beside what they are of."""
    layers = (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(3))
    compiled = memgraph.compile(nn.Sequential(*layers), ROOM, loss=lambda out: out.float().square().mean())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = compiled(torch.randn(512, 2))
    loss.backward()
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak


def cast(model: Any) -> list[Fact]:
    """Steps whose forward is cast."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Fact] = []
    for step in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch(seed=step))
            loss = out.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [out, model(batch())]
    return found


def test_a_scaled_loss() -> None:
    def loop(model: Any) -> list[Fact]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for step in range(2):
            scaler.scale(model(batch(seed=step)).square().mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return []

    assert_alike(loop)


@pytest.mark.long
@tight
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    def loop(model: Any) -> list[Fact]:
        found = steps(model, 1)
        for training in (True, False):
            model.train(training)
            with mode():
                out = model(batch())
            assert not out.requires_grad
            assert out.is_inference() == (mode is torch.inference_mode)
            found.append(out)
        model.train()
        return found + steps(model, 1)

    assert_alike(loop, Running)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_call_inside_of_a_checkpoint(reentrant: bool) -> None:
    def loop(model: Any) -> list[Fact]:
        x = batch().requires_grad_()
        for _ in range(2):
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
        return [x.grad]

    assert_alike(loop, Plain)


def test_a_call_whose_saved_tensors_shall_lie_elsewhere() -> None:
    def loop(model: Any) -> list[Fact]:
        with torch.autograd.graph.save_on_cpu():
            return steps(model, 2)

    assert_alike(loop)


def test_hooks_of_saved_tensors_see_no_tensor_of_a_capture() -> None:
    seen: list[type] = []

    def note(tensor: Tensor) -> Tensor:
        seen.append(type(tensor))
        return tensor.detach()

    def loop(model: Any) -> list[Fact]:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return steps(model, 2)

    assert_alike(loop)
    assert set(seen) <= {Tensor, nn.Parameter}


def test_anomaly_detection_finds_nothing_in_a_good_step() -> None:
    def loop(model: Any) -> list[Fact]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                return steps(model, 2)

    assert_alike(loop)
