"""Trainers, layers and optimizers of other libraries, which `pip install memgraph[libraries]` brings, train as without a
budget, or are refused by name."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import memgraph
from memgraph.optim.optimizer_profiler import update_nbytes
from memgraph.profile.memory_meter import resident_bytes
from memgraph.storage.mapped_storage import is_offloaded
from memgraph.tensors.parameter_groups import state_tensors
from memgraph.tensors.state_leaves import state_leaves
from tests.end_to_end.test_trainer import WORDS, gpt2, history, trainer_of
from tests.support.compare import ROOM
from tests.support.smallest_budget import smallest_of
from tests.support.streamed_state import assert_kept, batch, chain, loss

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")]
LETTERS = ["<pad>", "<eos>", "<unk>", *map(chr, range(97, 123))]


def words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama(folder: str) -> Any:
    """A model that lies in a folder, from which a trainer may load it again as its reference."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=len(LETTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    words().save_pretrained(folder)
    return transformers.LlamaForCausalLM.from_pretrained(folder)


def of_trl(kind: str, callback: Any = None, is_late: bool = False) -> Any:
    """Two steps of a trainer of TRL."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    folder = tempfile.mkdtemp()
    told: dict[str, Any] = dict(
        max_steps=2, report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=4, gradient_checkpointing=False,
    )  # fmt: skip
    rows: dict[str, list[dict[str, Any]]] = {
        "SFT": [{"text": "abcdefgh" * 4}] * 16,
        "DPO": [{"prompt": "abcd", "chosen": "efgh" * 4, "rejected": "hgfe" * 3}] * 16,
        "KTO": [{"prompt": "abcd", "completion": "efgh" * (3 + i % 2), "label": bool(i % 2)} for i in range(16)],
        "GRPO": [{"prompt": "abcd"}] * 16,
    }
    more: dict[str, Any] = {}
    if kind == "GRPO":
        told |= {"num_generations": 2, "max_completion_length": 6}
        more["reward_funcs"] = lambda completions, **rest: [float(len(text)) for text in completions]
    trainer = getattr(trl, f"{kind}Trainer")(
        llama(folder), args=getattr(trl, f"{kind}Config")(folder, **told), processing_class=words(),
        train_dataset=datasets.Dataset.from_list(rows[kind]), callbacks=[callback] if callback and not is_late else [],
        **more,
    )  # fmt: skip
    if callback and is_late:
        trainer.add_callback(callback)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("kind", "is_late"), [("SFT", False), ("SFT", True), ("DPO", False), ("KTO", False), ("GRPO", False)]
)
def test_a_trainer_of_trl_that_puts_its_own_forward_in_place_is_planned_and_trains_to_the_same_bits(
    kind: str, is_late: bool
) -> None:
    callback = memgraph.MemoryBudget("1GB", time_limit=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*outside of the budget")
        ours = of_trl(kind, callback, is_late)
    theirs = of_trl(kind)
    assert callback.plan is not None and callback.plan.counted
    assert [row.get("loss") for row in ours.state.log_history] == [row.get("loss") for row in theirs.state.log_history]
    assert all(map(torch.equal, ours.model.parameters(), theirs.model.parameters()))


def test_a_budget_that_no_plan_of_trl_fits_is_raised_before_the_first_step() -> None:
    with pytest.raises(memgraph.BudgetError):
        of_trl("SFT", memgraph.MemoryBudget(10_000, time_limit=0))


def four_bits(kind: str, twice: bool) -> Any:
    """An adapter of a model whose linear layers have 4 bits."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = gpt2()
    torch.manual_seed(0)
    model.lm_head = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 61))
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            told = dict(bias=True, quant_type=kind, compute_dtype=torch.float32, compress_statistics=twice)
            small = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, **told)
            small.load_state_dict(layer.state_dict())
            model.set_submodule(path, small.to("cpu"))
    model.requires_grad_(False).enable_input_require_grads()
    adapter = LoraConfig(
        r=2, target_modules=["lm_head.0", "lm_head.1", "c_attn"], lora_dropout=0.1, fan_in_fan_out=True
    )
    return get_peft_model(model, adapter)


@pytest.mark.parametrize(("kind", "twice"), [("nf4", True), ("fp4", False)])
def test_an_adapter_of_layers_with_4_bits_trains_to_the_same_bits(kind: str, twice: bool) -> None:
    found = []
    for is_planned in (False, True):
        model = four_bits(kind, twice)
        step = memgraph.compile(model, ROOM, time_limit=0) if is_planned else model
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        torch.manual_seed(1)
        for row in range(2):
            tokens = WORDS[row]["input_ids"][None]
            step(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([each for each in model.parameters() if each.requires_grad])
    assert found[0] and all(map(torch.equal, *found))


def test_a_layer_with_8_bits_is_refused_by_name() -> None:
    layer = pytest.importorskip("bitsandbytes").nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False)
    layer.load_state_dict(nn.Linear(64, 32, bias=False).state_dict())
    model = nn.Sequential(layer.to("cpu").requires_grad_(False), nn.Linear(32, 4))
    with pytest.raises(memgraph.CaptureError, match=r"0 \(Linear8bitLt\).*Int8Params"):
        memgraph.compile(model, ROOM)(torch.randn(4, 64))


@pytest.mark.parametrize(("library", "name"), [("bitsandbytes", "adamw_bnb_8bit"), ("torchao", "adamw_torch_8bit")])
def test_an_optimizer_of_8_bits_is_counted_or_said_not_to_be(
    library: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optim = pytest.importorskip(f"{library}.optim")
    if library == "bitsandbytes":  # its overrides go by positions, and would hold for the optimizers of other tests
        monkeypatch.setattr(optim.GlobalOptimManager, "_instance", None)
    options: dict[str, Any] = {"optim": name, "max_steps": 1, "eval_strategy": "no", "load_best_model_at_end": False}
    callback = memgraph.MemoryBudget("1GB", time_limit=0)
    ours = trainer_of(gpt2(), WORDS, tmp_path / "ours", callbacks=[callback], **options)
    if library == "bitsandbytes":
        with pytest.warns(RuntimeWarning, match="its states and its update are not counted"):
            ours.train()
    else:
        ours.train()
    assert callback.plan is not None and callback.plan.counted == (library == "torchao")
    theirs = trainer_of(gpt2(), WORDS, tmp_path / "plain", **options)
    theirs.train()
    assert history(ours)[:1] == history(theirs)[:1]
    assert all(map(torch.equal, ours.model.parameters(), theirs.model.parameters()))


@pytest.mark.parametrize(
    ("library", "name"),
    [("bitsandbytes", "AdamW8bit"), ("bitsandbytes", "Lion8bit"), ("torchao", "AdamW8bit"), ("torchao", "AdamW4bit")],
)
def test_states_of_few_bits_are_counted_and_keep_their_bits(library: str, name: str) -> None:
    optim = pytest.importorskip(f"{library}.optim")
    x, found = torch.randn(32, 128, generator=torch.Generator().manual_seed(0)), list[list[Tensor]]()
    for is_planned in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
        optimizer = getattr(optim, name)(module.parameters(), lr=1e-2)
        step = memgraph.compile(module, ROOM, optimizer=optimizer, time_limit=0) if is_planned else module
        for _ in range(3):
            step(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(list(module.parameters()))
    assert all(map(torch.equal, *found))
    assert isinstance(step, memgraph.CompiledModule) and step.plan.counted and not step.plan.beyond
    assert update_nbytes(optimizer)[0] >= resident_bytes(state_tensors(optimizer)) > 0


@pytest.mark.parametrize(
    ("library", "name", "leaf"),
    [
        ("bitsandbytes", "AdamW8bit", "state1"),
        ("bitsandbytes", "Lion8bit", "state1"),
        ("torchao", "AdamW8bit", "exp_avg.codes"),
        ("torchao", "AdamW4bit", "exp_avg.codes"),
    ],
)
def test_states_of_few_bits_are_on_disk_and_keep_their_bits(library: str, name: str, leaf: str) -> None:
    optim = pytest.importorskip(f"{library}.optim")
    plain, module = chain(10), chain(10)
    theirs, ours = (getattr(optim, name)(each.parameters(), lr=1e-2) for each in (plain, module))
    wishes: dict[str, Any] = {"budget": 1, "optimizer": ours, "loss": loss, "time_limit": 0}
    budget = int(1.05 * smallest_of(lambda: memgraph.plan(module, batch(), **wishes)))
    model = memgraph.compile(module, budget, optimizer=ours, loss=loss, time_limit=0)
    for seed in range(4):
        for run, optimizer in ((lambda x: loss(plain(x)), theirs), (model, ours)):
            optimizer.zero_grad()
            run(batch(seed)).backward()
            optimizer.step()
        assert all(map(torch.equal, plain.parameters(), module.parameters()))
    found = {each.name for state in ours.state.values() for each in state_leaves(state) if is_offloaded(each.tensor)}
    assert leaf in found
    assert_kept(model, budget)


def observed() -> nn.Module:
    """A network for quantization-aware training."""
    from torch.ao import quantization

    torch.manual_seed(0)
    made = nn.Sequential(quantization.QuantStub(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).train()
    made.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(made, inplace=True)


@pytest.mark.filterwarnings("ignore")
def test_observers_that_take_their_shapes_in_the_first_call_are_refused_until_they_have_them() -> None:
    x, found = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), list[list[Tensor]]()
    with pytest.raises(memgraph.CaptureError, match=r"shape \(16,\), where it was \(1,\).* run the plain module once"):
        memgraph.compile(observed(), ROOM)(x)
    for is_planned in (False, True):
        plain = observed()
        plain(x)
        step = memgraph.compile(plain, ROOM, time_limit=0) if is_planned else plain
        for _ in range(3):
            step(x).square().sum().backward()
        found.append([*(each.grad for each in plain.parameters() if each.grad is not None), *plain.buffers()])
    assert all(map(torch.equal, *found))
