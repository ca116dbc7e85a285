"""transformers' own Trainer takes a compiled model for the one it was made of, and does with it what it did with that.

Losses, norms and checkpoints are those of the plain model, under a budget in which the plain model's step has no room.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset

import memgraph
from tests.support.compare import ROOM

SHARE = 0.92  # of the bytes that the step takes as it is
TIMES = ("runtime", "per_second")


class Rows(Dataset[dict[str, Any]]):
    """Sixteen rows of tokens, and a column that no model takes."""

    def __init__(self, **columns: Callable[[Tensor], Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row >= len(self):
            raise IndexError(row)
        tokens = torch.randint(3, 61, (24,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": tokens, "row": row} | {name: column(tokens) for name, column in self.columns.items()}


WORDS = Rows(labels=lambda tokens: tokens)
CLASSES = Rows(label=lambda tokens: int(tokens[0]) % 3)


def gpt2() -> Any:
    """Its input and its output embeddings are one tensor."""
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    config.loss_type = "ForCausalLM"
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    transformers.set_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def bert() -> Any:
    transformers.set_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))


def lora() -> Any:
    """The adapter of a frozen model, which hands on a gradient only because its embeddings are made to want one."""
    adapter = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    return get_peft_model(gpt2(), adapter)


def trainer_of(
    model: Any, rows: Rows, folder: Path, callbacks: Any = None, model_init: Any = None, **options: Any
) -> Any:
    """Two epochs of two updates, each of two batches of four rows, with clipping; all of it logged, saved, evaluated."""
    told = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_train_epochs": 2, "max_grad_norm": 0.01, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2,
        "save_steps": 2, "load_best_model_at_end": True, "use_cpu": True, "report_to": [], "disable_tqdm": True,
    } | options  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **told)
    return transformers.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=callbacks, model_init=model_init
    )


def history(trainer: Any) -> list[dict[str, Any]]:
    """Return the trainer's log without times and bytes."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(TIMES) and not name.startswith("memory_")}
        for entry in trainer.state.log_history
    ]


def tightly(model: Any, rows: Rows, **modes: Any) -> Any:
    """The model, compiled under less than a batch takes as it is."""
    batch: dict[str, Any] = {
        name: torch.stack([torch.as_tensor(rows[i][name]) for i in range(4)]) for name in ("input_ids", *rows.columns)
    }
    if "label" in batch:
        batch["labels"] = batch.pop("label")
    with torch.autocast("cpu", torch.bfloat16, **modes):
        peak = memgraph.plan(model, **batch, budget=ROOM, time_limit=0).peak
    return memgraph.compile(model, int(SHARE * peak), time_limit=0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "rows", "options"),
    [(gpt2, WORDS, {}), (bert, CLASSES, {"bf16": True})],
    ids=["a language model with tied weights", "a classifier in bfloat16"],
)
def test_trainer_trains_saves_resumes_and_finds_the_best_as_with_the_plain_model(
    make: Callable[[], Any], rows: Rows, options: dict[str, Any], tmp_path: Path
) -> None:
    compiled = tightly(make(), rows, enabled="bf16" in options)
    theirs = trainer_of(make(), rows, tmp_path / "plain", **options)
    theirs.train()
    ours = trainer_of(compiled, rows, tmp_path / "ours", **options)
    ours.train()
    assert history(ours) == history(theirs)
    assert any("eval_loss" in entry for entry in history(ours))
    reports = [step.report for step in compiled._kept.steps]
    assert len(reports) == 3  # a first batch, one that adds to its gradients, one of the evaluation; also behind a save
    assert any(report.plan for report in reports)
    assert all(report.measured is None or report.measured <= report.peak <= report.budget for report in reports)
    assert ours.state.best_model_checkpoint.endswith(Path(theirs.state.best_model_checkpoint).name)
    last = tmp_path / "ours" / "checkpoint-4"
    assert {path.name for path in last.iterdir()} == {
        path.name for path in (tmp_path / "plain" / "checkpoint-4").iterdir()
    }
    assert (last / "config.json").exists()
    loaded = type(make()).from_pretrained(tmp_path / "ours" / Path(ours.state.best_model_checkpoint).name)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), theirs.model.state_dict().values(), strict=True)
    )

    again = trainer_of(memgraph.compile(make(), ROOM), rows, tmp_path / "ours", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert history(again)[:-1] == history(theirs)[:-1]  # the last entry's mean is over the steps of this run


@pytest.mark.long
def test_labels_of_a_language_model_are_shifted_before_they_are_smoothed(tmp_path: Path) -> None:
    theirs = trainer_of(gpt2(), WORDS, tmp_path / "plain", label_smoothing_factor=0.1)
    theirs.train()
    ours = trainer_of(memgraph.compile(gpt2(), ROOM), WORDS, tmp_path / "ours", label_smoothing_factor=0.1)
    ours.train()
    assert history(ours) == history(theirs)


@pytest.mark.long
@pytest.mark.parametrize("place", ["the adapted model", "the model below the adapter"])
def test_trainer_trains_an_adapter_as_with_the_plain_model(place: str, tmp_path: Path) -> None:
    options = {"load_best_model_at_end": False, "num_train_epochs": 1, "gradient_checkpointing": True}
    theirs = trainer_of(lora(), WORDS, tmp_path / "plain", **options)
    theirs.train()
    ours = lora()
    if place == "the adapted model":
        ours = memgraph.compile(ours, ROOM)
    else:
        ours.base_model.model = memgraph.compile(ours.base_model.model, ROOM)
    assert isinstance(ours, PeftModel)
    trainer = trainer_of(ours, WORDS, tmp_path / "ours", **options)
    trainer.train()
    assert history(trainer) == history(theirs)
    saved = tmp_path / "ours" / "checkpoint-2"
    assert (saved / "adapter_config.json").exists()
    loaded = PeftModel.from_pretrained(gpt2(), str(saved)).state_dict()
    expected = theirs.model.state_dict()
    assert [name for name in loaded if not torch.equal(loaded[name], expected[name])] == []


@pytest.mark.long
def test_an_evaluation_that_generates_is_that_of_the_plain_model(tmp_path: Path) -> None:
    assert predicted(memgraph.compile(t5(), ROOM, time_limit=0), tmp_path) == predicted(t5(), tmp_path)


def predicted(model: Any, folder: Path, **options: Any) -> tuple[list[list[int]], float]:
    """Return the tokens that an evaluation generates, and its loss."""
    arguments = transformers.Seq2SeqTrainingArguments(
        str(folder), predict_with_generate=True, generation_max_length=4, per_device_eval_batch_size=4,
        use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    found: Any = transformers.Seq2SeqTrainer(model, arguments, **options).predict(WORDS)
    return found.predictions.tolist(), found.metrics["test_loss"]


class Frozen(nn.Module):
    """A layer that is not trained, whose output is made to want a gradient, and one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.first.register_forward_hook(lambda module, args, output: output.requires_grad_())
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        result: Tensor = self.second(self.first(x).tanh() * scale)
        return result


def test_an_output_that_is_made_to_want_a_gradient_needs_none() -> None:
    plain = Frozen()
    compiled = memgraph.compile(plain, ROOM)
    found = []
    for model in (plain, compiled):
        plain.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        assert plain.second.weight.grad is not None
        found.append(plain.second.weight.grad)
    assert torch.equal(*found)


def test_a_hook_that_no_step_would_call_is_refused_with_what_helps() -> None:
    module = Frozen()
    module.first.register_forward_hook(lambda module, args, output: output.register_hook(print) and None)
    with pytest.raises(memgraph.CaptureError, match=r"shape \(2, 8\).* hook,(?s:.*)output of the module"):
        memgraph.compile(module, ROOM)(torch.ones(2, 8))


def test_a_compiled_module_is_of_the_class_and_takes_what_the_plain_one_takes() -> None:
    plain = Frozen()
    compiled = memgraph.compile(plain, ROOM)
    assert isinstance(compiled, Frozen)
    assert isinstance(compiled, memgraph.CompiledModule)
    assert type(compiled) is not Frozen
    assert (compiled._get_name(), repr(compiled)) == ("Frozen", f"CompiledModule({plain!r}, budget='1GB')")
    assert str(inspect.signature(compiled.forward)) == "(x: 'Tensor', *, scale: 'float' = 1.0)"
    losing = memgraph.compile(plain, ROOM, loss=nn.MSELoss(), microbatches=2)
    assert list(inspect.signature(losing.forward).parameters) == ["x", "scale", "target"]


def test_accelerate_unwraps_to_the_compiled_module_and_leaves_the_plain_one_alone() -> None:
    plain = Frozen()
    compiled = memgraph.compile(plain, ROOM)
    AcceleratorState._reset_state(reset_partial_state=True)  # which a Trainer of this process may have left
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(compiled)
    assert prepared(torch.ones(2, 8)).dtype == torch.float32
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is compiled
    assert not {"forward", "_original_forward"} & set(vars(plain))
    assert compiled(torch.ones(2, 8)).dtype == torch.float32
    assert len(compiled._kept.steps) == 2
