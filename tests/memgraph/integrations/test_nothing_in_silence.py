"""Whatever a trainer does with a model that has a budget, its steps are planned, or an error or a warning says no."""

from __future__ import annotations

import functools
import logging
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainerCallback

import memgraph
from tests.end_to_end.test_trainer import WORDS, gpt2, history, trainer_of

ONCE: dict[str, Any] = {
    "max_steps": 1, "eval_strategy": "no", "load_best_model_at_end": False, "gradient_accumulation_steps": 1,
}  # fmt: skip


def own_forward(model: Any) -> None:
    """Put a forward in place that never calls the one before it."""

    @functools.wraps(type(model).forward)
    def of_another(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    model.forward = MethodType(of_another, model)


class Replacing(TrainerCallback):  # type: ignore[misc]
    """Replaces forward, at some event of the trainer."""

    def __init__(self, event: str) -> None:
        setattr(self, event, lambda args, state, control, model, **rest: own_forward(model))


@pytest.mark.long
def test_a_model_that_the_trainer_makes_itself_is_planned(tmp_path: Path) -> None:
    def trained(callbacks: Any) -> Any:
        made = trainer_of(None, WORDS, tmp_path, callbacks, model_init=gpt2)
        made.train()
        return made

    callback = memgraph.MemoryBudget("1GB", time_limit=0)
    assert history(trained([callback])) == history(trained(None))
    assert callback.plan is not None and callback.plan.counted
    with pytest.raises(memgraph.BudgetError):
        trained([memgraph.MemoryBudget(20_000, time_limit=0)])


@pytest.mark.long
@pytest.mark.parametrize("event", ["on_init_end", "on_train_begin", "on_epoch_begin"])
def test_a_forward_that_is_put_in_place_before_a_step_is_the_one_that_is_planned(event: str, tmp_path: Path) -> None:
    callback = memgraph.MemoryBudget("1GB", time_limit=0)
    trainer_of(gpt2(), WORDS, tmp_path, [callback, Replacing(event)], **ONCE).train()
    assert callback.plan is not None


def test_a_forward_that_is_put_in_place_within_a_step_is_an_error_before_the_update(tmp_path: Path) -> None:
    trainer = trainer_of(gpt2(), WORDS, tmp_path, [memgraph.MemoryBudget("1GB"), Replacing("on_step_begin")], **ONCE)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(
        memgraph.UnplannedError, match=r"no call of the GPT2LMHeadModel was planned.*took the place of its forward"
    ):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_a_step_that_calls_a_part_of_the_model_is_an_error(tmp_path: Path) -> None:
    class OfPart(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **rest: Any) -> Tensor:
            loss: Tensor = model.transformer(inputs["input_ids"]).last_hidden_state.square().mean()
            return loss

    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[])
    trainer = OfPart(gpt2(), arguments, train_dataset=WORDS, callbacks=[memgraph.MemoryBudget("1GB")])
    with pytest.raises(memgraph.UnplannedError, match="a part of it, or another module, was called"):
        trainer.train()


def test_an_evaluation_of_a_forward_that_was_replaced_is_said_to_be_unplanned(tmp_path: Path) -> None:
    callback = memgraph.MemoryBudget("1GB", time_limit=0)
    trainer = trainer_of(gpt2(), WORDS, tmp_path, [callback])
    own_forward(trainer.model)
    with pytest.warns(RuntimeWarning, match="a batch of this evaluation ran outside of the budget"):
        trainer.evaluate()
    assert callback.plan is not None  # that of the next batch


@pytest.mark.parametrize("way", ["torch_compile", "a compiled model", "compiled in place"])
def test_a_budget_beside_torch_compile_is_refused(way: str, tmp_path: Path) -> None:
    model: Any = gpt2()
    if way == "compiled in place":
        model.compile()
    compiled: Any = torch.compile(model) if way == "a compiled model" else model
    options = {"torch_compile": True} if way == "torch_compile" else {}
    with pytest.raises(memgraph.UnplannedError, match="choose one"):
        trainer_of(compiled, WORDS, tmp_path, [memgraph.MemoryBudget("1GB")], **options)


@pytest.mark.long
def test_a_loss_outside_of_the_model_that_exceeds_the_budget_is_said_with_its_bytes(tmp_path: Path) -> None:
    def told(budget: Any, smoothing: float) -> tuple[list[str], int]:
        callback = memgraph.MemoryBudget(budget, time_limit=0)
        options: dict[str, Any] = ONCE | {"label_smoothing_factor": smoothing}
        trainer = trainer_of(gpt2(), WORDS, tmp_path, [callback], **options)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.train()
        assert callback.plan is not None
        return [
            str(each.message) for each in said if "between forward and backward" in str(each.message)
        ], callback.plan.peak

    assert told("1GB", 0.1)[0] == []
    peak = told("1GB", 0.1)[1]
    (message,) = told(peak, 0.1)[0]
    assert "loss=" in message and f"over its budget of {peak}" in message
    assert told(told("1GB", 0.0)[1], 0.0)[0] == []


def test_a_budget_of_lightning_is_refused_beside_torch_compile_and_a_step_without_a_planned_call_is_an_error(
    tmp_path: Path,
) -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss: Tensor = self.net[1](self.net[0](batch[0])).sum()  # and never self.net
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(module: Any) -> None:
        told: dict[str, Any] = dict(
            max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, default_root_dir=tmp_path, callbacks=[memgraph.LightningBudget("1GB")],
        )  # fmt: skip
        lightning.Trainer(**told).fit(module, DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4))

    module = Module()
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(memgraph.UnplannedError, match="choose one"):
        fit(torch.compile(Module()))
    with pytest.raises(memgraph.UnplannedError, match="no call of the Sequential was planned"):
        fit(module)
    assert all(map(torch.equal, before, module.parameters()))
