"""Measure how soon the command line answers: first line, end, and memory, each in a process of its own.

    python -m benchmarks.commands [--only plan]

    doctor              first line 4.1 s, end  6.0 s,  5.1 s of CPU, 0.4 GB
    plan GPT2-124M      first line 4.0 s, end 21.4 s, 20.1 s of CPU, 2.1 GB      (goal: 1 s, 20 s)

The cache of prices is empty in each run.  The first line is the first one on stderr.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

FACTORY = """
import torch
import transformers

def gpt2():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    tokens = torch.randint(0, 50257, (4, 256))
    return {"model": model, "kwargs": {"input_ids": tokens, "labels": tokens},
            "optimizer": torch.optim.AdamW(model.parameters())}
"""
COMMANDS = {
    "doctor": ["doctor"],
    "plan": ["plan", "{}:gpt2", "--budget", "2.6GB"],
    "explain": ["explain", "{}:gpt2"],
}


def main(only: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(COMMANDS)}")] = None) -> None:
    """Run each command once."""
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "factory_of_benchmark.py").write_text(FACTORY)
        for name in only or COMMANDS:
            command = [each.format(file) for each in COMMANDS[name]]
            print(f"{' '.join(COMMANDS[name]):<36}", _run(command, Path(folder) / name), flush=True)


def _run(command: list[str], cache: Path) -> str:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "memgraph", *command],
        env={**os.environ, "MEMGRAPH_CACHE": str(cache)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None and process.stdout is not None
    process.stderr.readline()
    first = time.perf_counter() - began
    verdict, _ = process.communicate()
    ended, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak = f"{after.ru_maxrss / 1e6:.1f} GB"  # of the largest child so far
    said = verdict.splitlines()[0] if verdict else ""
    times = f"first line {first:.1f} s, end {ended:.1f} s, {cpu:.1f} s of CPU"
    return f"{times}, {peak}, exit code {process.returncode}: {said}"


if __name__ == "__main__":
    typer.run(main)
