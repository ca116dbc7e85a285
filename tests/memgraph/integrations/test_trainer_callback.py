"""A callback gives the Trainer of transformers a budget, and all else stays as without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import memgraph
from tests.end_to_end.test_trainer import (
    CLASSES,
    SHARE,
    WORDS,
    Rows,
    bert,
    gpt2,
    history,
    lora,
    predicted,
    t5,
    trainer_of,
)  # fmt: skip
from tests.support.compare import ROOM


def budget_of(make: Callable[[], Any], rows: Rows, **modes: Any) -> int:
    """Return less than a step of the trainer takes as it is, its optimizer included."""
    model = make()
    batch: dict[str, Any] = {
        name: torch.stack([torch.as_tensor(rows[i][name]) for i in range(4)]) for name in ("input_ids", *rows.columns)
    }
    if "label" in batch:
        batch["labels"] = batch.pop("label")
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    with torch.autocast("cpu", torch.bfloat16, **modes):
        peak = memgraph.plan(model, **batch, budget=ROOM, time_limit=0, optimizer=optimizer, accumulate=True).peak
    return int(SHARE * peak)


class Reporter(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps what it is told, as a callback for TensorBoard does, which comes before those of the user."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        self.lines.append(dict(logs))


@pytest.mark.long
@pytest.mark.parametrize("given", ["budget", "arguments", "environment"])
def test_the_log_has_the_bytes_of_steps_for_all_who_read_it(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, reporter = budget_of(bert, CLASSES), Reporter()
    if given == "environment":
        monkeypatch.setenv("MEMGRAPH_BUDGET", f"{budget}B")
    callback = memgraph.MemoryBudget(budget if given == "budget" else None, time_limit=0)
    trainer = trainer_of(bert(), CLASSES, tmp_path, callbacks=[reporter], logging_steps=1)
    if given == "arguments":
        trainer.args.memory_budget = budget
    trainer.add_callback(callback)
    trainer.train()
    lines = [line for line in reporter.lines if "loss" in line]
    assert len(lines) > 1 and callback.plan is not None and callback.plan.budget == budget
    for line in lines:
        assert (
            0
            < line["memory_peak_mb"]
            <= line["memory_forecast_mb"]
            <= line["memory_budget_mb"]
            == round(budget / 1e6, 3)
        )
        assert line["memory_overhead"] >= 0
    kept = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["memory_peak_mb"] for line in kept] == [line["memory_peak_mb"] for line in lines]
    assert all("memory_peak_mb" not in line for line in reporter.lines if "loss" not in line)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "rows", "options"),
    [(gpt2, WORDS, {}), (bert, CLASSES, {"bf16": True}), (lora, WORDS, {})],
    ids=["tied weights", "a classifier in bfloat16", "an adapter"],
)
def test_it_trains_evaluates_saves_and_resumes_as_without_it(
    make: Callable[[], Any], rows: Rows, options: dict[str, Any], tmp_path: Path
) -> None:
    budget = budget_of(make, rows, enabled="bf16" in options)
    theirs = trainer_of(make(), rows, tmp_path / "plain", **options)
    theirs.train()
    callback = memgraph.MemoryBudget(budget, time_limit=0)
    ours = trainer_of(make(), rows, tmp_path / "ours", callbacks=[callback], **options)
    ours.train()
    assert history(ours) == history(theirs)
    assert callback.plan is not None and callback._budget.compiled is not None
    reports = [step.report for step in callback._budget.compiled._kept.steps]
    assert any(report.plan for report in reports) and all(report.counted for report in reports)
    assert all(report.measured is None or report.measured <= report.peak <= budget for report in reports)
    again = trainer_of(
        make(), rows, tmp_path / "ours", callbacks=[memgraph.MemoryBudget(budget, time_limit=0)], **options
    )
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], value), name
        assert torch.equal(again.model.state_dict()[name], value), name


@pytest.mark.long
def test_a_callback_may_be_added_to_a_trainer_that_exists(tmp_path: Path) -> None:
    theirs = trainer_of(bert(), CLASSES, tmp_path / "plain", bf16=True)
    theirs.train()
    ours, callback = (
        trainer_of(bert(), CLASSES, tmp_path / "ours", bf16=True),
        memgraph.MemoryBudget("1GB", time_limit=0),
    )
    ours.add_callback(callback)
    ours.train()
    assert history(ours) == history(theirs)
    assert callback.plan is not None


@pytest.mark.parametrize("use_cache", [True, False], ids=["with a cache", "without one"])
def test_generation_runs_the_plain_model(use_cache: bool, tmp_path: Path) -> None:
    callback = memgraph.MemoryBudget("1GB", time_limit=0)
    trainer = trainer_of(gpt2(), WORDS, tmp_path, callbacks=[callback])
    prompt = WORDS[0]["input_ids"][None, :4]
    told: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": use_cache}
    assert torch.equal(trainer.model.generate(prompt, **told), gpt2().generate(prompt, **told))
    assert callback.plan is None


@pytest.mark.long
def test_an_evaluation_that_generates_is_that_of_the_plain_model_and_plans_its_loss_alone(tmp_path: Path) -> None:
    callback = memgraph.MemoryBudget("1GB", time_limit=0)
    ours, plain = t5(), t5()
    ours.generation_config.use_cache = plain.generation_config.use_cache = False
    assert predicted(ours, tmp_path, callbacks=[callback]) == predicted(plain, tmp_path)
    assert callback._budget.compiled is not None
    assert len(callback._budget.compiled.plans) == 1


@pytest.mark.long
def test_hooks_of_the_model_run_once_a_call(tmp_path: Path) -> None:
    model, calls = gpt2(), list[int]()
    model.register_forward_hook(lambda *_: calls.append(1))
    trainer_of(model, WORDS, tmp_path, callbacks=[memgraph.MemoryBudget("1GB", time_limit=0)])
    model(input_ids=WORDS[0]["input_ids"][None])
    model(input_ids=WORDS[0]["input_ids"][None])
    assert len(calls) == 2


@pytest.mark.long
def test_a_budget_that_no_plan_fits_is_raised_before_the_first_step(tmp_path: Path) -> None:
    trainer = trainer_of(gpt2(), WORDS, tmp_path, callbacks=[memgraph.MemoryBudget(20_000, time_limit=0)])
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(memgraph.BudgetError):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))


@pytest.mark.parametrize("name", ["optimizer", "loss", "microbatches"])
def test_what_is_the_trainers_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="the trainer has the optimizer"):
        memgraph.MemoryBudget("1GB", **{name: 2})


def test_the_arguments_of_forward_are_those_of_the_model(tmp_path: Path) -> None:
    trainer = trainer_of(gpt2(), WORDS, tmp_path, callbacks=[memgraph.MemoryBudget("1GB")])
    trainer._set_signature_columns_if_needed()
    plain = trainer_of(gpt2(), WORDS, tmp_path)
    plain._set_signature_columns_if_needed()
    assert trainer._signature_columns == plain._signature_columns
    assert isinstance(trainer.model, transformers.GPT2LMHeadModel)


@pytest.mark.parametrize(
    ("budget", "options", "kind", "said"),
    [
        ("8XB", {}, ValueError, "budget='8XB' can't be read"),
        ([8], {}, TypeError, "budget is a list"),
        ("8GB", {"offlaod": None}, TypeError, "offlaod= is no option of memgraph.compile, which has accumulate, "),
    ],
)
def test_a_budget_or_an_option_that_is_wrong_is_refused_where_it_is_given(
    budget: Any, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        memgraph.MemoryBudget(budget, **options)
