"""Forecasts of `memgraph fit` for this machine's CPU, without weights, beside what the same models then measure here.

    python -m benchmarks.fit [NAME ...]   ->   a table, and results/fit.md if all models ran

Stock architectures made small, of `benchmarks/zoo`: once on device "meta", by the profile of this CPU, and once with
AdamW on real tensors. `saved` is what forward leaves for backward, with the outputs; `update` is the workspace of the
optimizer's step. Bytes, and the error of each forecast: its excess over what was measured.
"""

from __future__ import annotations

import copy
import gc
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memgraph
from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.training import Training
from memgraph.fit.described_model import ModelCall
from memgraph.fit.device_profile import DeviceProfile
from memgraph.fit.fitted_step import FittedStep, Fitting
from memgraph.fit.measured_profile import measured_profile
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from passes import Trace, predict

NAMES = (
    "gpt2", "llama", "gemma3", "phi3", "gpt_neox", "bloom", "falcon", "opt", "bert", "distilbert", "albert", "esm",
    "mixtral", "t5", "vit", "convnext_v2", "segformer", "lstm", "transformer_encoder", "unet",
    "bart", "whisper", "swin", "deberta_v2", "electra",  # tried once `fit` was written, and never while it was
)  # fmt: skip
SOURCES = ("parameters", "inputs", "gradients", "states", "saved", "update", "peak")
RESULTS = Path(__file__).parent / "results" / "fit.md"
REPEATS = 5


@dataclass(frozen=True)
class Row:
    """Bytes of each source, forecast and measured, and the time of the forecast over that of eager's step."""

    name: str
    bytes: dict[str, tuple[int, int]]
    time: float
    seconds: float

    def error(self, source: str) -> float:
        """Return the excess of the forecast over what was measured, as a share of the measured peak."""
        forecast, measured = self.bytes[source]
        return (forecast - measured) / self.bytes["peak"][1]


def main(names: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Print a table, and write it if no names were given."""
    profile = measured_profile()
    rows = list(_rows(names or list(NAMES), profile))
    text = "\n".join(_table(rows))
    print(text)
    if not names:
        RESULTS.write_text(text + "\n")


def _rows(names: list[str], profile: DeviceProfile) -> Iterator[Row]:
    for name in names:
        try:
            yield _row(name, profile)
        except Exception as error:  # as the table says how many ran
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)


def _row(name: str, profile: DeviceProfile) -> Row:
    torch.manual_seed(0)
    training = ARCHITECTURES[name].make()
    given = {key: value for key, value in training.kwargs.items() if key != "attention_mask"}  # forward asks for values
    training = replace(training, kwargs=given)
    began = time.process_time()
    fitted = _fitted(training, profile)
    seconds = time.process_time() - began
    forecast, measured = _forecast(fitted), _measured(training)
    both = {source: (forecast[source], measured[source]) for source in SOURCES}
    return Row(name, both, predict(fitted.trace, fitted.machine).us / 1e6 / _eager_s(training), seconds)


def _fitted(training: Training, profile: DeviceProfile) -> FittedStep:
    """Return the step of the same call without bytes."""
    model = _without_bytes(training.model)
    args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), (training.args, dict(training.kwargs)))
    wrapped = _WithLoss(model, training)
    optimizer = torch.optim.AdamW(model.parameters())
    return Fitting(profile, profile.memory)(ModelCall(wrapped, args, kwargs, optimizer))


def _without_bytes(model: nn.Module) -> nn.Module:
    """Return a copy on device "meta", with the same parameters shared."""
    copied, known = copy.deepcopy(model), dict[int, Tensor]()
    for part in copied.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in known:
                    moved = tensor.detach().to("meta")
                    known[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if name in part._parameters else moved
            tensors.update({name: known[id(tensor)] for name, tensor in tensors.items() if tensor is not None})  # type: ignore[misc]
    return copied


class _WithLoss(nn.Module):
    """A model that returns its loss alone."""

    def __init__(self, model: nn.Module, training: Training) -> None:
        super().__init__()
        self.model, self.loss = model, training.loss

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.loss(self.model(*args, **kwargs))


def _forecast(fitted: FittedStep) -> dict[str, int]:
    trace = fitted.trace

    def made(*kinds: str) -> int:
        return sum(op.nbytes for op in trace.ops if op.fn in kinds)

    return {
        "parameters": made("parameter", "buffer"),
        "inputs": made("input"),
        "gradients": _storages(trace, {value for kind, value in trace.outputs if kind == "gradient"}),
        "states": made("state"),
        "saved": _storages(trace, _saved(trace)),
        "update": trace.ops[-1].workspace,
        "peak": predict(trace, fitted.machine).peak,
    }


def _saved(trace: Trace) -> set[str]:
    """Return the values of forward that backward reads, or the caller gets."""
    forward = {op.name for op in trace.ops if op.phase == "forward" and not op.is_input}
    read = {read for op in trace.ops if op.phase != "forward" for read in op.reads}
    return forward & (read | {value for kind, value in trace.outputs if kind == "output"})


def _storages(trace: Trace, values: set[str]) -> int:
    """Return the bytes of the storages that values hold, but those of inputs."""
    held = {storage for op in trace.ops if op.name in values for storage in op.holds}
    return sum(m.nbytes for op in trace.ops if not op.is_input for m in op.makes if m.name in held)


def _measured(training: Training) -> dict[str, int]:
    """Run two steps; the first measures itself."""
    wrapped = _WithLoss(training.model, training)
    optimizer = torch.optim.AdamW(training.model.parameters())
    compiled = memgraph.compile(wrapped, 1.0, optimizer=optimizer, accumulate=False)

    def run() -> Tensor:
        loss: Tensor = compiled(*training.args, **training.kwargs)
        return loss

    run().backward()
    gradients = resident_bytes(p.grad for p in training.model.parameters() if p.grad is not None)
    optimizer.step()
    measured = compiled.plan.measured
    optimizer.zero_grad()
    gc.collect()
    loss, forward = measure_peak(run)
    loss.backward()
    del loss
    _, update = measure_peak(optimizer.step)
    assert measured is not None and forward is not None and update is not None
    states = pytree.tree_leaves(dict(optimizer.state))
    inputs = [leaf for leaf in pytree.tree_leaves((training.args, dict(training.kwargs))) if isinstance(leaf, Tensor)]
    return {
        "parameters": resident_bytes([*training.model.parameters(), *training.model.buffers()]),
        "inputs": resident_bytes(inputs),
        "gradients": gradients,
        "states": resident_bytes(leaf for leaf in states if isinstance(leaf, Tensor)),
        "saved": forward.net,
        "update": update.peak,
        "peak": measured,
    }


def _eager_s(training: Training) -> float:
    """Return the shortest CPU time of forward, backward and update."""
    wrapped, optimizer = _WithLoss(training.model, training), torch.optim.AdamW(training.model.parameters())
    taken = []
    for _ in range(REPEATS):
        optimizer.zero_grad()
        began = time.process_time()
        wrapped(*training.args, **training.kwargs).backward()
        optimizer.step()
        taken.append(time.process_time() - began)
    return min(taken)


def _table(rows: list[Row]) -> Iterator[str]:
    yield "# Forecasts without weights"
    yield ""
    yield (
        f"`python -m benchmarks.fit`; torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{platform.machine()}. {len(rows)} of {len(NAMES)} architectures. Measured MB, and the error of the forecast "
        "without weights in bytes; at the end as a share of the measured peak; `time` is forecast over eager's CPU "
        "time; `s` are CPU seconds to capture and price."
    )
    yield ""
    yield "| model | peak MB | " + " | ".join(SOURCES) + " | time | s |"
    yield "|---" * (len(SOURCES) + 4) + "|"
    for row in rows:
        errors = " | ".join(f"{row.bytes[source][0] - row.bytes[source][1]:+d}" for source in SOURCES)
        yield f"| {row.name} | {row.bytes['peak'][1] / 1e6:.2f} | {errors} | {row.time:.2f} | {row.seconds:.1f} |"
    if rows:
        worst = " | ".join(f"{100 * max((r.error(s) for r in rows), key=abs):+.2f} %" for s in SOURCES)
        middle = " | ".join(f"{100 * statistics.median(abs(r.error(s)) for r in rows):.2f} %" for s in SOURCES)
        yield f"| largest | | {worst} | | |"
        yield f"| median | | {middle} | {statistics.median(row.time for row in rows):.2f} | |"


if __name__ == "__main__":
    typer.run(main)
