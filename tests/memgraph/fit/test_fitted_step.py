"""A step without bytes is that of the same model with weights: the same ops, and the same forecast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.errors import CaptureError
from memgraph.fit.described_model import ModelCall, config_model
from memgraph.fit.device_profile import DeviceProfile, read_profile
from memgraph.fit.fitted_step import FittedStep, Fitting
from memgraph.fit.other_sizes import guessed_trace
from passes import BudgetError, predict

CPU = DeviceProfile("cpu", "cpu", 10**10, {"float32": 1e11}, 1e10, link={"out": 1e9, "back": 1e9})


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)])


def _call(device: str = "meta", batch: int = 128) -> ModelCall:
    model = _model(device)
    return ModelCall(model, (torch.empty(batch, 64, device=device),), {}, torch.optim.AdamW(model.parameters()))


def _fitted(profile: DeviceProfile = CPU, budget: int = 10**9, **given: Any) -> FittedStep:
    return Fitting(profile, budget)(_call(**given))


def test_the_forecast_is_that_of_the_same_model_with_weights() -> None:
    call = _call("cpu")
    assert call.optimizer is not None
    compiled = memgraph.compile(call.model, "1GB", optimizer=call.optimizer, accumulate=False)
    compiled(torch.randn(128, 64)).square().mean().backward()
    call.optimizer.step()
    forecast, measured = _fitted().smallest_plan().peak, compiled.plan.measured
    assert forecast == pytest.approx(compiled.plan.peak, abs=64)  # without scalars of the optimizer's step
    outputs = 2 * 128 * 64 * 4  # with their gradient, which the caller may free
    assert measured is not None and forecast - outputs <= measured <= forecast


def test_a_model_with_real_tensors_is_the_same_step() -> None:
    assert _fitted(device="cpu").trace == _fitted().trace


def test_a_plan_is_made_for_a_budget_and_saved() -> None:
    plain = _fitted().smallest_plan().peak
    report = _fitted(budget=int(0.8 * plain)).plan(seconds=5)
    assert report.peak <= 0.8 * plain and report.plan
    assert memgraph.Report.from_json(report.to_json()).peak == report.peak


def test_a_budget_that_is_too_small_names_one_that_works() -> None:
    with pytest.raises(BudgetError) as error:
        _fitted(budget=100_000).smallest_plan()
    works = error.value.smallest
    assert _fitted(budget=works).smallest_plan().peak <= works


def test_on_a_gpu_storages_are_blocks_and_libraries_count() -> None:
    step = _fitted(read_profile("l4"))
    assert all(made.nbytes % 512 == 0 for op in step.trace.ops for made in op.makes)
    kept = predict(step.trace, step.machine).peak - predict(_fitted().trace, step.machine).peak
    assert kept >= read_profile("l4").libraries
    assert all(op.us > 0 for op in step.trace.ops if op.fn == "aten.addmm.default")


def test_a_faster_device_takes_less_time() -> None:
    slow, fast = (
        _fitted(replace(CPU, flops={"float32": rate}, bandwidth=rate / 10)).smallest_plan().forecast.us
        for rate in (1e10, 1e12)
    )
    assert fast == pytest.approx(slow / 100, rel=0.05)


def test_another_batch_is_guessed_from_two_that_were_captured() -> None:
    known = {batch: _fitted(batch=batch).trace for batch in (64, 128)}
    assert guessed_trace({64: known[64]}, 128) is None
    guessed, real = guessed_trace(known, 320), _fitted(batch=320).trace
    assert guessed is not None
    assert [op.makes for op in guessed.ops] == [op.makes for op in real.ops]


class Asks(nn.Module):
    """A module that looks at its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if bool((x > 0).all()) else self.linear(-x)


def test_a_model_that_asks_for_values_is_refused_with_advice() -> None:
    with pytest.raises(CaptureError, match="values of tensors"):
        Fitting(CPU, 10**9)(ModelCall(Asks(), (torch.empty(4, 8, device="meta"),)))


def test_configurations_without_weights_become_models(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaConfig(vocab_size=256, **small).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        described = config_model(str(path), torch.bfloat16, "sgd")
        call = described.call(2, 32)
        assert all(p.device.type == "meta" and p.dtype == torch.bfloat16 for p in call.model.parameters())
        assert call.kwargs["input_ids"].shape == (2, 32) and described.longest == 2048
        assert Fitting(CPU, 10**9)(call).smallest_plan().peak > 0


def test_configurations_that_have_no_language_model_are_refused(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"a vit, which has no causal language model.*FILE:FACTORY"):
        config_model(str(tmp_path), torch.float32, "adamw")
