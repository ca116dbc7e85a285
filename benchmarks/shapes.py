"""Measure the cost of each new batch length, where batches are padded to their longest sample.

    python -m benchmarks.shapes [--layers 12] [--width 256] [--lengths 20]

A GPT2-like and a BERT-like model are trained on batches of different lengths, beside eager, under a budget below what
what the longest needs without a plan. Seconds are CPU times from the call to a step that is ready. The second
length is captured with symbols. Then a second module is compiled: its prices are known, and its first capture is on
disk.
"""

from __future__ import annotations

import copy
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import memgraph
from memgraph.api.kept_steps import KeptSteps
from memgraph.capture import trace_call
from memgraph.capture.joint.trace_joint import trace_joint

ROWS, WORDS, LONGEST = 8, 1000, 192
SHARE = 0.75  # of what the longest batch needs without a plan
COLUMNS = (
    "model", "first s", "second s", "later s: median", "max", "median / first", "max / first", "prices known: first s",
    "later s", "share", "lengths", "planned", "traced", "equal", "within",
)  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Seconds of planning for each new length, the same with known prices, and the results of the comparison."""

    seconds: list[float]
    known: list[float]
    plans: int
    traced: int
    equal: bool
    within: bool


def main(layers: int = 12, width: int = 256, lengths: int = 20) -> None:
    """Print one line for each model; exit with 1 if a step is not eager's or breaks the budget."""
    os.environ.setdefault("MEMGRAPH_CACHE", tempfile.mkdtemp())
    warnings.simplefilter("ignore")
    table, wrong = Table(*COLUMNS, box=None), 0
    for name, model in (("GPT2-like", gpt(layers, width)), ("BERT-like", bert(layers, width))):
        found = figures(model, lengths)
        first, second, *later = found.seconds
        median, most = statistics.median(later), max(later)
        shares = f"{median / first:.1%}", f"{most / first:.1%}"
        known = statistics.median(found.known[2:])
        second_module = f"{found.known[0]:.2f}", f"{known:.2f}", f"{known / found.known[0]:.1%}"
        numbers = str(len(found.seconds)), str(found.plans), str(found.traced), str(found.equal), str(found.within)
        table.add_row(
            name, f"{first:.2f}", f"{second:.2f}", f"{median:.2f}", f"{most:.2f}", *shares, *second_module, *numbers
        )
        wrong += not (found.equal and found.within)
    Console(width=200).print(table)
    raise typer.Exit(wrong > 0)


def gpt(layers: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=width, n_head=4, vocab_size=WORDS, n_positions=256, use_cache=False)
    )


def bert(layers: int, width: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=4, intermediate_size=4 * width,
        vocab_size=WORDS, max_position_embeddings=256,
    )  # fmt: skip
    return BertForMaskedLM(config)


def batch_of(length: int) -> dict[str, Any]:
    """Return a batch that is padded to its longest sample, with masks and labels."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, WORDS, (ROWS, length), generator=generator)
    ends = torch.randint(length // 2, length + 1, (ROWS, 1), generator=generator)
    ends[0] = length
    mask = (torch.arange(length)[None] < ends).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def figures(model: nn.Module, count: int) -> Figures:
    """Train beside eager on batches of `count` lengths, each twice."""
    drawn = random.Random(0).sample(range(LONGEST // 2, LONGEST), count)
    eager, budget = copy.deepcopy(model), int(SHARE * memgraph.plan(model, **batch_of(LONGEST), budget="16GB").peak)
    compiled = memgraph.compile(model, budget, offload=None, accumulate=False)
    is_equal, is_within = True, True
    with counting() as counts:
        for seed, length in enumerate([*drawn, *drawn]):
            found, expected = facts(compiled, model, length, seed), facts(eager, eager, length, seed)
            is_equal = is_equal and len(found) == len(expected) and all(map(torch.equal, found, expected))
            report = compiled.plan
            is_within = is_within and report.measured is not None and report.measured <= report.peak <= budget
    plans = sum(bool(report.plan) for report in compiled.plans)
    with counting() as known:
        again = memgraph.compile(model, budget, offload=None, accumulate=False)
        for length in drawn:
            again(**batch_of(length)).loss.backward()
            model.zero_grad(set_to_none=True)
    return Figures(counts.seconds[:count], known.seconds, plans, counts.traces, is_equal, is_within)


def facts(called: nn.Module, model: nn.Module, length: int, seed: int) -> list[Tensor]:
    """Train on one batch; return the loss and the gradients."""
    torch.manual_seed(seed)
    loss = called(**batch_of(length)).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.01)
            parameter.grad = None
    return [loss.detach(), *gradients]


class Counts:
    """Seconds of each planning, and the number of traces."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.traces = 0


@contextmanager
def counting() -> Iterator[Counts]:
    """Time each planning, and count the traces."""
    counts, plan, trace = Counts(), KeptSteps._new_step, trace_joint

    def timed(*args: Any) -> Any:
        began = time.process_time()
        step = plan(*args)
        counts.seconds.append(time.process_time() - began)
        return step

    def counted(*args: Any) -> Any:
        counts.traces += 1
        return trace(*args)

    with mock.patch.object(KeptSteps, "_new_step", timed), mock.patch.object(trace_call, "trace_joint", counted):
        yield counts


if __name__ == "__main__":
    typer.run(main)
