"""Compare a head and its loss in slices with other ways to keep logits from existing whole.

    python -m benchmarks.slices heads [--rounds 5] [--only gpt2] [--parts 16]
    python -m benchmarks.slices peaks
    python -m benchmarks.slices longest [--budget 600MB]
    python -m benchmarks.slices gaps [--only gpt2-narrow]

`heads`: the peak of a whole step, and its CPU time over eager's, all steps in turn in one process.  Beside eager and
memgraph run a loss over chunks of the tokens that are checkpointed, and one whose gradient is made in forward, as
libraries of fused losses do.  Models are of transformers, in their stock configuration but for the sizes in `MODELS`.

`peaks`: the peaks that are forecast for longer batches, without a run: bytes of parameters, gradients, activations and
temporaries, and no workspaces.

`longest`: the longest sequence that trains within a budget: eager, each block checkpointed, and memgraph.

`gaps`: the plan that slices="auto" takes, for budgets between parameters with gradients and the peak of the step.
Beside it are the fastest plans with slices that run nothing twice, with those whose forward ops run again, and without
any, each searched for on its own.  Times are forecasts with new pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memgraph
from benchmarks.clock import Pairs, Step, in_turn, peak, step_of
from memgraph.api.compiler import make_planner
from memgraph.capture.capture import capture
from memgraph.graph.summarize import summarize
from memgraph.planning.progress import Progress
from memgraph.profile.memory_meter import resident_bytes
from memgraph.slices.step_slices import SliceRequest, in_slices
from memgraph.system.byte_sizes import budget_nbytes
from passes import BudgetError, Machine, PlanResult, make_plan, predict
from passes.slices.slice import Slice

CHUNK = 64  # tokens of a chunk, in the losses by hand
SAME = {"num_hidden_layers": 4, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 128_000}
SMALL = {"n_layer": 4, "n_embd": 256, "n_head": 4}  # 16M parameters, 13M of them rows of words
MODELS: dict[str, tuple[str, dict[str, object], tuple[int, int]]] = {
    "gpt2": ("GPT2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, (4, 256)),
    "small": ("GPT2", {**SMALL, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, (4, 256)),
    "llama": ("Llama", {**SAME, "num_key_value_heads": 12, "intermediate_size": 2048}, (2, 512)),
    "gemma": ("Gemma2", {**SAME, "num_key_value_heads": 12, "intermediate_size": 2048, "head_dim": 64}, (2, 512)),
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
GAPS: dict[str, tuple[str, dict[str, object], tuple[int, int]]] = {
    "gpt2-narrow": ("GPT2", {"n_layer": 2, "n_embd": 96, "n_head": 4, "vocab_size": 8000, **NO_DROPOUT}, (2, 128)),
    "gpt2-deep": ("GPT2", {"n_layer": 6, "n_embd": 128, "n_head": 4, "vocab_size": 4000, **NO_DROPOUT}, (4, 128)),
    "gpt2-wide": ("GPT2", {"n_layer": 3, "n_embd": 256, "n_head": 4, "vocab_size": 12_000, **NO_DROPOUT}, (2, 256)),
    "llama-narrow": ("Llama", {**LLAMA, "intermediate_size": 384, "vocab_size": 8000}, (2, 256)),
}
SHARES = (0.97, 0.9, 0.8, 0.65, 0.5)  # of the bytes between parameters with gradients and the peak of the step


@dataclass(frozen=True)
class Model:
    """A model for language of transformers, without its loss.

    Attributes:
        cap: of the logits, which are softly capped; 0 for none.
    """

    whole: nn.Module
    body: nn.Module
    head: nn.Linear
    cap: float
    vocabulary: int

    @classmethod
    def of(cls, name: str) -> Model:
        """Return a model with random parameters."""
        import transformers

        kind, sizes, _ = (MODELS | GAPS)[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**sizes)
        class_name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        whole = getattr(transformers, class_name)(config)
        body = getattr(whole, whole.base_model_prefix)
        cap = getattr(config, "final_logit_softcapping", None) or 0.0
        return cls(whole, body, whole.lm_head, cap, config.vocab_size)


class LossAlone(nn.Module):
    """A model that returns its loss without the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


class Chunked(nn.Module):
    """The loss of a model, chunk by chunk; backward makes each chunk of the logits a second time."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.body, self.head, self.cap = model.body, model.head, model.cap

    def forward(self, ids: Tensor) -> Tensor:
        hidden, labels = _shifted(self.body, ids)
        loss = partial(_loss_of_chunk, cap=self.cap)
        parts = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
        sums = [checkpoint(loss, h, self.head.weight, y, use_reentrant=False) for h, y in parts]
        return torch.stack(sums).sum() / len(labels)


class GradientInForward(Chunked):
    """The loss of a model, chunk by chunk, whose gradient is made in forward."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden, labels = _shifted(self.body, ids)
        loss: Tensor = _InForward.apply(hidden, self.head.weight, labels, self.cap)  # type: ignore[no-untyped-call]
        return loss


class _InForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, cap: float) -> Tensor:
        total, rows, gradient = hidden.new_zeros(()), torch.empty_like(hidden), torch.zeros_like(weight)
        for begin in range(0, len(hidden), CHUNK):
            part = slice(begin, begin + CHUNK)
            with torch.enable_grad():
                h, w = hidden[part].detach().requires_grad_(), weight.detach().requires_grad_()
                loss = _loss_of_chunk(h, w, labels[part], cap=cap) / len(labels)
                rows[part], own = torch.autograd.grad(loss, (h, w))
            gradient += own
            total += loss.detach()
        ctx.save_for_backward(rows, gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, gradient = ctx.saved_tensors
        return rows * tangents[0], gradient * tangents[0], None, None


def _shifted(body: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    hidden: Tensor = body(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[:, :-1].reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1)


def _loss_of_chunk(hidden: Tensor, weight: Tensor, labels: Tensor, cap: float) -> Tensor:
    logits = hidden @ weight.t()
    if cap:
        logits = torch.tanh(logits / cap) * cap
    return F.cross_entropy(logits.float(), labels, reduction="sum")


app = typer.Typer(add_completion=False)


@app.command()
def heads(rounds: int = 5, only: str = "", parts: int = 16, tokens: int = 0) -> None:
    """Print peaks and times of a step with a head and a loss, for each model."""
    for name in [only] if only else list(MODELS):
        model = Model.of(name)
        batch, length = MODELS[name][2]
        ids = torch.randint(0, model.vocabulary, (batch, tokens // batch or length))
        sliced = memgraph.compile(LossAlone(model.whole), None, slices={"model.lm_head": parts})
        ways: dict[str, nn.Module] = {
            "eager": LossAlone(model.whole),
            "chunks, checkpointed": Chunked(model),
            "gradient in forward": GradientInForward(model),
            "memgraph": sliced,
        }
        steps = {way: step_of(module, partial(module, ids)) for way, module in ways.items()}
        taken = in_turn(steps, rounds, 3, _cpu_seconds)
        peaks = {way: peak(model.whole, [ids], step) for way, step in steps.items()}
        title = f"{name}, {batch} x {ids.shape[1]} tokens, {_machine()}, {rounds} rounds"
        _print(title, taken, peaks, parts)


def _print(title: str, taken: dict[str, list[float]], peaks: dict[str, int], parts: int) -> None:
    table = Table("way", "peak MB", "to eager's", "CPU s", "to eager's", "middle half", title=title, box=None)
    for way, seconds in taken.items():
        pairs = Pairs(seconds, taken["eager"])
        share = f"{peaks[way] / peaks['eager'] - 1:+.1%}"
        named = f"{way}, {parts} parts" if way == "memgraph" else way
        median = f"{sorted(seconds)[len(seconds) // 2]:.2f}"
        table.add_row(named, f"{peaks[way] / 1e6:.1f}", share, median, pairs.ratio_text, pairs.spread_text)
    Console(width=120).print(table)


@app.command()
def peaks(parts: int = 64) -> None:
    """Print the forecast peak of a step whole and in slices, for batches of several lengths."""
    table = Table(
        "model", "tokens", "whole MB", "in slices MB", "saved", title=f"{parts} parts, {_machine()}", box=None
    )
    for name in MODELS:
        model = Model.of(name)
        for samples in (1, 2, 4, 8):
            ids = torch.randint(0, model.vocabulary, (samples, 1024))
            captured = capture(LossAlone(model.whole), (ids,), {})
            request = SliceRequest({"model.lm_head": parts}, (), 0, torch.device("cpu"))
            sliced = in_slices(captured, request, lambda trace: trace)
            machine = Machine(0)
            before, after = (predict(summarize(each.graph.graph), machine).peak for each in (captured, sliced))
            saved = f"{after / before - 1:+.1%}"
            table.add_row(name, str(ids.numel()), f"{before / 1e6:.0f}", f"{after / 1e6:.0f}", saved)
    Console(width=120).print(table)


@app.command()
def gaps(only: str = "", seconds: float = 12.0) -> None:
    """Print how far plans are from the fastest of all kinds and from what is proven, for several budgets."""
    columns = "model", "budget", "taken", "ms", "over fastest", "over bound", "in slices", "run again", "whole"
    table = Table(*columns, title=f"{_machine()}, a search of {seconds:.0f} s for each kind", box=None)
    rows: list[_Gap] = []
    for name in [only] if only else list(GAPS):
        model = Model.of(name)
        module, ids = LossAlone(model.whole), torch.randint(0, model.vocabulary, GAPS[name][2])
        least = 2 * resident_bytes(module.parameters())
        most = memgraph.plan(module, ids, budget=1.0, accumulate=False).peak
        for share in SHARES:
            rows.append(_gap(module, ids, least + int(share * (most - least)), seconds))
            table.add_row(name, f"{share:.0%}", *rows[-1].cells)
    Console(width=130).print(table)
    for title, shares in {
        "the first that fits over the fastest": [row.first_us / row.fastest_us - 1 for row in rows],
        "taken over the fastest": [row.taken_us / row.fastest_us - 1 for row in rows],
        "taken over the bound of its own class": [row.taken.gap for row in rows],
        "the fastest without new pages over the bound of all": [row.gap for row in rows],
    }.items():
        print(f"{title}: median {sorted(shares)[len(shares) // 2]:.2%}, most {max(shares):.2%}")


@dataclass(frozen=True)
class _Gap:
    """The plan that is taken, and that of each kind in the order of attempts; None if none fits.

    Attributes:
        us: microseconds of the plan of each kind that fits, with new pages.
    """

    taken: memgraph.Report
    kinds: dict[str, PlanResult | None]
    us: dict[str, float]

    @property
    def taken_us(self) -> float:
        slices = self.taken.slices
        return self.us["twice" if any(cut.reruns for cut in slices) else "once" if slices else "whole"]

    @property
    def fastest_us(self) -> float:
        return min(self.us.values())

    @property
    def first_us(self) -> float:
        return next(iter(self.us.values()))

    @property
    def gap(self) -> float:
        found = [kind for kind in self.kinds.values() if kind is not None]
        return min(kind.forecast.us for kind in found) / min(kind.lower_bound for kind in found) - 1

    @property
    def cells(self) -> list[str]:
        parts = "+".join(str(cut.parts) for cut in self.taken.slices) or "whole"
        kinds = (f"{self.us[kind] / 1e3:.2f}" if kind in self.us else "" for kind in ("once", "twice", "whole"))
        ratios = f"{self.taken_us / self.fastest_us - 1:.2%}", f"{self.taken.gap:.2%}"
        return [parts, f"{self.taken_us / 1e3:.2f}", *ratios, *kinds]


def _gap(module: nn.Module, ids: Tensor, budget: int, seconds: float) -> _Gap:
    """Return the plan of each kind, and then the one that is taken for a budget, at the same prices."""
    planner = make_planner(module, budget, slices="auto", accumulate=False)
    kinds: dict[str, PlanResult | None] = {}
    with Progress() as progress:
        for step in planner.priced((ids,), {}, planner.options.outputs, progress, for_any_budget=True)(budget):
            slices: Sequence[Slice] = step.cuts[0]  # type: ignore[index]
            kind = "twice" if any(cut.reruns for cut in slices) else "once" if slices else "whole"
            kinds[kind] = None
            with suppress(BudgetError):
                kinds[kind] = make_plan(step.trace, step.machine, seconds=seconds)
            if kind == "whole":
                break  # weights in blocks would be next
    taken = memgraph.plan(module, ids, budget=budget, slices="auto", accumulate=False)
    return _Gap(taken, kinds, {kind: plan.forecast.us for kind, plan in kinds.items() if plan is not None})


@app.command()
def longest(
    budget: str = "600MB", only: str = "small", step: int = 64, most: int = 8192, time_limit: float = 40.0
) -> None:
    """Print the longest sequence of one sample that each way trains within a budget, and its CPU time a token."""
    allowed = budget_nbytes(budget, torch.device("cpu"), 0)
    found = {
        "eager": partial(_fits_measured, only, allowed, False),
        "each block checkpointed": partial(_fits_measured, only, allowed, True),
        "memgraph": partial(_fits_planned, only, allowed, time_limit),
    }
    table = Table("way", "tokens", "CPU ms a token", title=f"{only}, {budget}, {_machine()}", box=None)
    length = 0
    for way, fits in found.items():
        shorter = length
        length, per_token = _bisect(fits, step, most)
        table.add_row(way, f"{length}{' or more' * (length + step > most)}", f"{per_token:.2f}")
    if shorter and (took := found["memgraph"](shorter)) is not None:  # attention costs more a token the more there are
        table.add_row("memgraph", str(shorter), f"{took / shorter:.2f}")
    Console(width=120).print(table)


Fits = Callable[[int], float | None]  # CPU milliseconds of a step with so many tokens; None if it does not fit


def _bisect(fits: Fits, step: int, most: int) -> tuple[int, float]:
    """Return the most tokens that fit, a multiple of `step`, and the milliseconds of each."""
    low, high, per_token = 0, most // step + 1, 0.0
    while high - low > 1:
        middle = (low + high) // 2
        took = fits(middle * step)
        low, high = (middle, high) if took is not None else (low, middle)
        per_token = per_token if took is None else took / (middle * step)
    return low * step, per_token


def _fits_measured(name: str, budget: int, checkpoints: bool, length: int) -> float | None:
    model = _long(name, length)
    if checkpoints:
        enable: Any = model.whole.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        model.whole.train()
    module, ids = LossAlone(model.whole), torch.randint(0, model.vocabulary, (1, length))
    step = step_of(module, partial(module, ids))
    return _cpu_seconds(step) * 1e3 if peak(model.whole, [ids], step) <= budget else None


def _fits_planned(name: str, budget: int, time_limit: float, length: int) -> float | None:
    model = _long(name, length)
    ids = torch.randint(0, model.vocabulary, (1, length))
    module = memgraph.compile(
        LossAlone(model.whole), budget, slices="auto", offload=None, time_limit=time_limit, accumulate=False
    )
    step = step_of(module, partial(module, ids))
    try:
        step()
    except memgraph.BudgetError:
        return None
    step()
    return _cpu_seconds(step) * 1e3


def _long(name: str, length: int) -> Model:
    """Return a model with as many positions."""
    kind, sizes, batch = MODELS[name]
    names = {"n_positions": max(length, 1024)} if kind == "GPT2" else {"max_position_embeddings": max(length, 1024)}
    MODELS[f"{name} of {length}"] = kind, {**sizes, **names}, batch
    return Model.of(f"{name} of {length}")


def _cpu_seconds(step: Step) -> float:
    begin = time.process_time()
    step()
    return time.process_time() - begin


def _machine() -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    app()
