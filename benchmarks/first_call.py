"""Measure the first call of a model by phases, with an empty cache of prices.

    python -m benchmarks.first_call [gpt2] [cells] [many_cells] [packed] [words] [mamba] [deep] [--share 0.6]

Each call is made in a process of its own, on one thread, with an empty folder for the cache of costs: once with a
budget that everything fits, and once with parameters, batch and a share of what the step holds above them.  CPU seconds
are what the process took, wall seconds what its user waited for; on a busy machine only the former can be compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any
from unittest import mock

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import memgraph
from benchmarks.clock import loop_text
from benchmarks.phases import Phases
from memgraph.capture import trace_call
from memgraph.planning import assembly, later_step, pricing, search, step_graph
from memgraph.planning.attempts import attempts

Call = tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]

# In the order of the table. The time of a phase is without that of the phases that it calls.
PHASES: tuple[tuple[str, Any, str], ...] = (
    ("trace", trace_call, "trace_joint"),
    ("functionalize", trace_call, "functionalize"),
    ("finalize", trace_call, "finalize_graph"),
    ("capture, rest", attempts, "capture_step"),
    ("grads", step_graph, "accumulate_grads"),
    ("price", pricing.Pricing, "__call__"),
    ("summarize", step_graph, "summarize"),
    ("links", pricing, "measure_tiers"),
    ("plan", search.PlanSearch, "__call__"),
    ("plan, adding", later_step, "plan_accumulated"),
    ("rewrite", assembly, "rewrite"),
    ("partition", assembly, "partition"),
)
REST = "first run, rest"


def gpt2() -> Call:
    """GPT2-124M as transformers has it, on 1 x 128 tokens."""
    ids = torch.randint(0, 50257, (1, 128))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config()), (ids,), {"labels": ids}


class Cells(nn.Module):
    """An LSTM cell in a loop over time steps."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(size, size), nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = memory = torch.zeros(x.shape[0], x.shape[2])
        for step in range(x.shape[1]):
            state, memory = self.cell(x[:, step], (state, memory))
        loss: Tensor = self.head(state).pow(2).mean()
        return loss


def cells() -> Call:
    return Cells(), (torch.randn(8, 300, 64),), {}


def many_cells() -> Call:
    """The same over 400 steps: 20,000 ops."""
    return Cells(), (torch.randn(8, 400, 64),), {}


class Packed(nn.Module):
    """A recurrent layer of torch over packed rows of several lengths."""

    def __init__(self, kind: Callable[..., nn.RNNBase], size: int = 32, **options: Any) -> None:
        super().__init__()
        self.layers = kind(size, size, batch_first=True, **options)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        loss: Tensor = pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0].square().mean()
        return loss


def packed() -> Call:
    """An LSTM of two layers in both directions, over 16 frames at most."""
    module = Packed(nn.LSTM, num_layers=2, bidirectional=True)
    return module, (torch.randn(8, 16, 32), torch.tensor([16, 16, 14, 13, 11, 11, 10, 9])), {}


def words() -> Call:
    """An LSTM over 64 words at most."""
    return Packed(nn.LSTM), (torch.randn(8, 64, 32), torch.tensor([64, 60, 52, 51, 48, 47, 46, 37])), {}


def mamba() -> Call:
    """A Mamba of two layers, in transformers' slow path: a loop over 64 tokens."""
    ids = torch.randint(0, 256, (1, 64))
    config = transformers.MambaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2)
    return transformers.MambaForCausalLM(config), (ids,), {"labels": ids}


def deep() -> Call:
    """A narrow GPT2 of 48 layers."""
    config = transformers.GPT2Config(vocab_size=512, n_embd=64, n_head=4, n_layer=48, n_positions=64)
    ids = torch.randint(0, 512, (1, 32))
    return transformers.GPT2LMHeadModel(config), (ids,), {"labels": ids}


CALLS: dict[str, Callable[[], Call]] = {
    "gpt2": gpt2,
    "cells": cells,
    "many_cells": many_cells,
    "packed": packed,
    "words": words,
    "mamba": mamba,
    "deep": deep,
}


def main(
    names: Annotated[list[str] | None, typer.Argument()] = None, share: float = 0.6, *, budget: int = 0,
    alone: Annotated[bool, typer.Option(help="one call in this process; prints its facts")] = False,
) -> None:  # fmt: skip
    """Print one table."""
    if alone:
        print(json.dumps(facts_of((names or [*CALLS])[0], budget)))
        return
    title = f"torch {torch.__version__}, 1 thread; {loop_text()}"
    table = Table("model", "budget", "ops", "CPU s", "wall s", title=title, box=None)
    for phase in (*(phase for phase, _, _ in PHASES), REST):
        table.add_column(phase, justify="right")
    for name in names or CALLS:
        room = _in_process(name, 0)
        table.add_row(name, "room", *_row(room))
        table.add_row(name, f"{share:.0%}", *_row(_in_process(name, room["fixed"] + int(share * room["above"]))))
    Console(width=200).print(table)


def facts_of(name: str, budget: int) -> dict[str, Any]:
    """Make the first call of a model, and return seconds by phase and the bytes of the step as it is."""
    torch.manual_seed(0)
    module, args, kwargs = CALLS[name]()
    model = memgraph.compile(module, budget or "16GB")
    began, cpu = time.perf_counter(), time.process_time()
    with _timed_phases() as seconds:
        result = model(*args, **kwargs)
        (result if isinstance(result, Tensor) else result.loss).backward()
    spent = time.process_time() - cpu
    seconds[REST] = spent - sum(seconds.values())
    captured = model.plan.choice.captured
    fixed = sum(op.nbytes for op in captured.trace.ops if op.is_input)
    ops = len(model.plan.choice.forecast.trace.ops)
    wall = time.perf_counter() - began
    return {
        "ops": ops, "cpu": spent, "wall": wall, "phases": seconds, "fixed": fixed, "above": captured.peak - fixed,
    }  # fmt: skip


@contextmanager
def _timed_phases() -> Iterator[dict[str, float]]:
    """Measure the CPU seconds of each phase, without those of phases inside it."""
    phases = Phases(phase for phase, _, _ in PHASES)
    with ExitStack() as stack:
        for phase, owner, name in PHASES:
            stack.enter_context(mock.patch.object(owner, name, phases.timed(phase, getattr(owner, name))))
        yield phases.seconds


def _in_process(name: str, budget: int) -> dict[str, Any]:
    """Return the facts of a first call that is made in a process of its own, with an empty cache."""
    command = [sys.executable, "-m", "benchmarks.first_call", name, "--alone", "--budget", str(budget)]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"MEMGRAPH_CACHE": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _row(facts: dict[str, Any]) -> list[str]:
    seconds = [facts["cpu"], facts["wall"], *(facts["phases"][phase] for phase in facts["phases"])]
    return [str(facts["ops"]), *(f"{value:.1f}" if value >= 0.05 else "-" for value in seconds)]


if __name__ == "__main__":
    typer.run(main)
