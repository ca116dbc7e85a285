"""Measure the cost of guards that hold: those on values in a step, and those on all else before it.

    python -m benchmarks.guards [--rounds 30] [--layers 12]

Each layer of the model checks that its result is finite, as models of transformers do in half precision.  Eager, the
compiled module, and a compiled module from whose graph the guards were erased run in turn in one process.  Eager reads
the same values, so the second ratio tells what guards add to what eager pays for its own checks.  Times are of the
process (CPU): a guard waits for nothing there, and other processes don't count.

The second table is of a GPT2 of transformers with as many layers: to read the facts of a call and find its step, beside
the guards of Dynamo.  These are what a call of `torch.compile` takes with a graph that returns constants, less what it
takes where guards are skipped.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import memgraph
from benchmarks.clock import Pairs, Step, in_turn, ms_text
from memgraph.graph.guard_ops import AGREE, EQUAL

WIDTH, LENGTH, BATCH = 256, 128, 4


class Checked(nn.Module):
    """A transformer whose layers branch on their results."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        make = partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.layers = nn.ModuleList(make() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if not torch.isfinite(x).all():
                raise FloatingPointError("a layer has made what is not finite")
        return x.square().mean()


def main(rounds: int = 30, layers: int = 12) -> None:
    """Print two tables."""
    torch.manual_seed(0)
    plain, x = Checked(layers), torch.randn(BATCH, LENGTH, WIDTH)
    guarded, erased = (memgraph.compile(copy.deepcopy(plain), "8GB") for _ in range(2))
    runs = {"eager": plain, "guarded": guarded, "without guards": erased}
    for model in (guarded, erased):
        for _ in range(4):
            _step(model, x)
    guards = _erase_guards(erased)
    taken = in_turn({name: partial(_step, model, x) for name, model in runs.items()}, rounds, 2, _cpu_seconds)
    title = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds, {guards} guards"
    table = Table("compared", "CPU ms", "to CPU ms", "ratio", "middle half", title=title, box=None)
    for name, other in (("guarded", "without guards"), ("guarded", "eager")):
        pairs = Pairs(taken[name], taken[other])
        table.add_row(
            f"{name} to {other}", ms_text(pairs.ours), ms_text(pairs.theirs), pairs.ratio_text, pairs.spread_text
        )
    Console(width=120).print(table)
    _print_facts(rounds, layers)


def _print_facts(rounds: int, layers: int) -> None:
    config = GPT2Config(n_layer=layers, n_embd=64, n_head=4, vocab_size=1000, use_cache=False)
    model, ids = GPT2LMHeadModel(config), torch.randint(0, 1000, (2, 16))
    compiled = memgraph.compile(copy.deepcopy(model), "1GB")
    compiled(input_ids=ids)
    kept: Any = compiled.__dict__["_kept"]

    def facts() -> None:
        call = kept.read((), {"input_ids": ids}, compiled.__dict__["_outputs"])
        assert kept.variants.find(call).step is not None

    ours = _median_us(facts, rounds)  # before Dynamo, which makes Python's own calls slower
    dynamo: Any = torch.compile(model, backend=_constants)
    for _ in range(3):
        dynamo(input_ids=ids)
    with_guards = _median_us(partial(dynamo, input_ids=ids), rounds)
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        without = _median_us(partial(dynamo, input_ids=ids), rounds)
    table = Table("before a step", "CPU us (median)", title=f"GPT2 of {layers} layers, again and again", box=None)
    table.add_row("memgraph: facts of a call and its step", f"{ours:.0f}")
    table.add_row("Dynamo: guards", f"{with_guards - without:.0f}")
    Console(width=120).print(table)


def _median_us(run: Step, rounds: int) -> float:
    times = [1e6 * _cpu_seconds(run) for _ in range(20 * rounds)]
    return sorted(times)[len(times) // 2]


def _constants(graph: Any, inputs: Any) -> Any:
    """Compile a graph to a function that returns what it has returned first."""
    with torch.no_grad():
        found = graph(*inputs)
    return lambda *args: found


def _cpu_seconds(step: Step) -> float:
    begin = time.process_time()
    step()
    return time.process_time() - begin


def _step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).backward()


def _erase_guards(model: memgraph.CompiledModule) -> int:
    """Erase the guards of all steps of a module, and return how many the latest has."""
    steps: Any = model.__dict__["_kept"].steps
    for step in steps:
        forward = step.parts.halves.forward
        nodes = [node for node in forward.graph.nodes if node.target in (EQUAL, AGREE)]
        for node in nodes:
            forward.graph.erase_node(node)
        forward.recompile()
    return len(nodes) - 1


if __name__ == "__main__":
    typer.run(main)
