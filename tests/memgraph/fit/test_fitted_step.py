"""A step without bytes is that of the same model with weights: the same ops, and the same forecast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memgraph
from memgraph.errors import CaptureError
from memgraph.fit.described_model import ModelCall, config_model
from memgraph.fit.device_profile import CONTEXT, DeviceProfile, read_profile
from memgraph.fit.fitted_step import FittedStep, Fitting
from memgraph.fit.other_sizes import guessed_trace
from passes import BudgetError, Machine, predict

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


@pytest.mark.long
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


@pytest.mark.long
def test_on_a_gpu_storages_are_blocks_and_libraries_count() -> None:
    step = _fitted(read_profile("l4"))
    assert all(made.nbytes % 512 == 0 for op in step.trace.ops for made in op.makes)
    kept = predict(step.trace, step.machine).peak - predict(_fitted().trace, step.machine).peak
    assert kept >= read_profile("l4").libraries
    assert all(op.us > 0 for op in step.trace.ops if op.fn == "aten.addmm.default")


@pytest.mark.long
def test_a_faster_device_takes_less_time() -> None:
    slow, fast = (
        _fitted(replace(CPU, flops={"float32": rate}, bandwidth=rate / 10)).smallest_plan().forecast.us
        for rate in (1e10, 1e12)
    )
    assert fast == pytest.approx(slow / 100, rel=0.05)


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "lora", "accumulate"),
    [
        ("adafactor", None, False),
        ("NAdam", None, False),
        ("adamw", 4, False),
        ("adamw", None, True),
        ("rprop", 4, True),
    ],
)
def test_optimizers_adapters_and_accumulation_take_the_bytes_of_a_real_step(
    optimizer: str, lora: int | None, accumulate: bool, tmp_path: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    config.save_pretrained(tmp_path)
    described = config_model(str(tmp_path), torch.float32, optimizer, lora)
    fitted = Fitting(CPU, 10**9, accumulate)(described.call(2, 32)).smallest_plan().peak
    model = transformers.LlamaForCausalLM(config)
    if lora is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(r=lora, target_modules="all-linear"))
    trained = [p for p in model.parameters() if p.requires_grad]
    kind: Any = next(each for name, each in vars(torch.optim).items() if name.lower() == optimizer.lower())
    ids = torch.randint(0, 256, (2, 32))
    real = memgraph.plan(
        model, input_ids=ids, labels=ids, use_cache=False, budget="1GB", optimizer=kind(trained, lr=1e-3),
        accumulate=accumulate,
    )  # fmt: skip
    assert fitted == pytest.approx(real.peak, rel=0.02)


@pytest.mark.parametrize(
    ("name", "said"),
    [("adam_w", "there is no optimizer 'adam_w' in torch.optim: give none, or one of ASGD"),
     ("muon", r"Muon can't update all parameters of this model .*FILE:FACTORY")],
)  # fmt: skip
def test_an_optimizer_that_there_is_not_or_that_cant_have_the_parameters_is_refused(
    name: str, said: str, tmp_path: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        config_model(str(tmp_path), torch.float32, name)


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
HEARS = {**SMALL, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16,
         "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer", "mask_time_prob": 0.0}  # fmt: skip
SEES = {**SMALL, "image_size": 32, "patch_size": 8}
SPEAKS = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
          "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 64}  # fmt: skip
WHISPERS = {**SPEAKS, "max_source_positions": 50, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "kind", "architecture"),
    [
        ("BertConfig", "BertForMaskedLM", None),
        ("BertConfig", "BertForSequenceClassification", "BertForSequenceClassification"),
        ("BertConfig", "BertForTokenClassification", "BertForTokenClassification"),
        ("BertConfig", "BertForQuestionAnswering", "BertForQuestionAnswering"),
        ("ViTConfig", "ViTForImageClassification", None),
        ("BartConfig", "BartForConditionalGeneration", None),
        ("T5Config", "T5ForConditionalGeneration", None),
        ("WhisperConfig", "WhisperForConditionalGeneration", None),
        ("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", None),
        ("ASTConfig", "ASTForAudioClassification", None),
    ],
)
def test_other_tasks_take_the_bytes_of_a_real_step(
    config: str, kind: str, architecture: str | None, tmp_path: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    texts = {"vocab_size": 64, "pad_token_id": 0}
    sizes: dict[str, dict[str, Any]] = {
        "BertConfig": {**SMALL, **texts},
        "ViTConfig": SEES,
        "BartConfig": {**SPEAKS, **texts},
        "T5Config": {**texts, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2},
        "WhisperConfig": WHISPERS,
        "Wav2Vec2Config": HEARS,
        "ASTConfig": {**SMALL, "max_length": 64, "num_mel_bins": 32},
    }
    names = {} if architecture is None else {"architectures": [architecture]}
    made = getattr(transformers, config)(**sizes[config], **names)
    made.save_pretrained(tmp_path)
    described = config_model(str(tmp_path), torch.float32, "adamw")
    assert described.title.startswith(f"{kind} of ")
    call = described.call(2, 640 if "seq" in described.sizes and config == "Wav2Vec2Config" else 16)
    fitted = Fitting(CPU, 10**9)(call).smallest_plan().peak

    model = getattr(transformers, kind)(call.model.config).train()
    batch = pytree.tree_map_only(Tensor, lambda x: torch.ones_like(x, device="cpu"), dict(call.kwargs))
    optimizer = torch.optim.AdamW(model.parameters())
    real = memgraph.plan(model, **batch, budget="1GB", optimizer=optimizer)
    ops = [replace(op, workspace=0) if "convolution" in op.fn else op for op in real.forecast.trace.ops]
    bare = replace(real.forecast.trace, ops=tuple(ops))  # a profile does not say what a convolution works in
    assert fitted == pytest.approx(predict(bare, Machine(10**9)).peak, rel=0.03)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["UNet2DModel", "UNet2DConditionModel", "DiTTransformer2DModel", "PixArtTransformer2DModel"]
)
def test_models_of_diffusers_take_the_bytes_of_a_real_step(kind: str, tmp_path: Any) -> None:
    diffusers = pytest.importorskip("diffusers")
    blocks = {"block_out_channels": (32, 32), "layers_per_block": 1, "sample_size": 16, "norm_num_groups": 8}
    layers = {"num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 1}
    sizes: dict[str, dict[str, Any]] = {
        "UNet2DModel": {**blocks, "down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2},
        "UNet2DConditionModel": {
            **blocks, "cross_attention_dim": 32, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
        "DiTTransformer2DModel": {**layers, "sample_size": 16},
        "PixArtTransformer2DModel": {**layers, "cross_attention_dim": 48, "caption_channels": 32},
    }  # fmt: skip
    model = getattr(diffusers, kind)(**sizes[kind])
    model.save_config(tmp_path)
    described = config_model(str(tmp_path), torch.float32, "adamw")
    assert described.title.startswith(f"{kind} of ") and set(described.sizes) == {"batch"}
    call = described.call(2, 1)
    fitted = Fitting(CPU, 10**9)(call).smallest_plan().peak
    batch = pytree.tree_map_only(Tensor, lambda x: torch.ones_like(x, device="cpu"), dict(call.kwargs))
    optimizer = torch.optim.AdamW(model.parameters())
    real = memgraph.plan(model, **batch, budget="1GB", optimizer=optimizer, loss=call.loss)
    assert fitted == pytest.approx(real.peak, rel=0.05)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"_class_name": "NoSuchModel"}', "a NoSuchModel, which diffusers .* does not have|is read with diffusers"),
        ('{"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1}',
         "a FluxTransformer2DModel, for which no batch is known|is read with diffusers"),
        ('{"_class_name": "UNet3DConditionModel"}',
         "a UNet3DConditionModel, for which no batch is known|is read with diffusers"),
        ('{"model_type": "detr"}', "a detr, for which no batch is known: .*FILE:FACTORY"),
        ('{"model_type": "llava"}', "a llava, for which no batch is known: .*FILE:FACTORY"),
    ],
)  # fmt: skip
def test_configurations_whose_batch_is_not_known_are_refused(written: str, said: str, tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(ValueError, match=said):
        config_model(str(tmp_path), torch.float32, "adamw")


def test_attention_is_chosen_by_name(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16}
    transformers.GPT2Config(**sizes, attn_pdrop=0.0).save_pretrained(tmp_path)
    peaks = {}
    for name in ("eager", "sdpa"):
        described = config_model(str(tmp_path), torch.float32, "none", attention=name)
        peaks[name] = Fitting(CPU, 10**9)(described.call(2, 256)).smallest_plan().peak
    assert peaks["eager"] > peaks["sdpa"]
    with pytest.raises(ValueError, match=r"transformers can't make .*no_such"):
        config_model(str(tmp_path), torch.float32, "none", attention="no_such")


def _gpu(held: int) -> DeviceProfile:
    """Return an H100 whose memory leaves so many bytes for torch's allocator."""
    return replace(read_profile("h100"), memory=held + CONTEXT, libraries=0)


@pytest.mark.long
def test_a_plan_fits_where_torchs_allocator_holds_no_more_than_the_device_has() -> None:
    budget = _fitted(_gpu(10**10)).smallest_plan().peak
    asked = _fitted(_gpu(10**10), budget=budget).smallest_plan()
    assert asked.on_card > asked.peak == budget
    memory = asked.on_card - 1_000_000
    lowered = _fitted(_gpu(memory), budget=budget).smallest_plan()
    assert lowered.on_card <= memory and lowered.budget < budget and lowered.plan
    for plan in (FittedStep.smallest_plan, FittedStep.plan):
        with pytest.raises(BudgetError, match=r"torch's allocator would hold \d+ bytes, by simulation") as error:
            plan(_fitted(_gpu(1_000_000), budget=budget))
        assert error.value.smallest > 1_000_000
    assert not _fitted(_gpu(1_000_000), budget=budget).is_likely_to_fit()


class Attends(nn.Module):
    def __init__(self, dropout: float, takes: str) -> None:
        super().__init__()
        self.inputs, self.dropout, self.takes = nn.Linear(64, 192), dropout, takes
        self.layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
        self.layer.self_attn.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        if self.takes == "layer":
            return self.layer(x).square().mean()
        q, k, v = self.inputs(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        if self.takes == "position":
            return F.scaled_dot_product_attention(q, k, v, None, self.dropout, True).mean()
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True).mean()


@pytest.mark.long
@pytest.mark.parametrize("takes", ["name", "position", "layer"])
def test_attention_with_dropout_is_one_op_on_a_gpu(takes: str) -> None:
    x = torch.empty(2, 256, 64, device="meta")
    with torch.device("meta"):
        plain, dropped = Attends(0.0, takes), Attends(0.1, takes)
    on_gpu = [Fitting(_gpu(10**10), 10**9)(ModelCall(model, (x,))).trace for model in (plain, dropped)]
    assert on_gpu[0] == on_gpu[1]
    on_cpu = Fitting(CPU, 10**9)(ModelCall(dropped, (x,))).trace
    assert any("softmax" in op.fn for op in on_cpu.ops)


def test_another_class_than_the_configurations_is_named(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.BertConfig(**SMALL, architectures=["BertForMultipleChoice"]).save_pretrained(tmp_path)
    with pytest.warns(RuntimeWarning, match="of BertForMultipleChoice, and what is planned is BertForMaskedLM"):
        assert config_model(str(tmp_path), torch.float32, "adamw").title.startswith("BertForMaskedLM of ")
