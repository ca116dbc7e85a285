"""Run a function on several ranks, each a process of its own with gloo.

results = on_ranks(2, function, *args)   # runs function(rank, *args) in each process; results in rank order

A fork server imports once for all tests what most of their ranks import: torch, memgraph and models of transformers. A rank
that fails takes the others with it, and its traceback is the test's; ranks that hang, or whose test is gone, are ended.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tests.support.time_limits import ends_with

SECONDS = 180  # for one start with all its work, and the first import on a busy machine
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["memgraph", "highspy", "pytest", "torch._dynamo", "tests.support.staged_models"]
PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "t5")]
FORKS.set_forkserver_preload(PRELOADED)


def on_ranks(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = SECONDS,
    lost: Collection[int] = (),
    meet: bool = True,
) -> list[Any]:
    """Return the function's result on each rank.

    Args:
        seconds: the timeout of the process group, and about that of the whole call.
        lost: ranks that will be killed or stopped; they are not waited for, and their result is None.
        meet: ranks wait for each other at the end, if no rank is lost.

    Raises:
        AssertionError: it failed on some rank, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [FORKS.Pipe(duplex=False) for _ in range(ranks)]
        started = []
        for rank, (_, end) in enumerate(pipes):
            given = (rank, ranks, Path(folder), seconds, end, meet and not lost, function, args)
            started.append(FORKS.Process(target=_one, args=given, daemon=True))
            started[-1].start()
            end.close()
        try:
            return _answers([begin for begin, _ in pipes], seconds + (SECONDS if lost or not meet else 0), lost)
        finally:
            for process in started:
                process.kill()
                process.join()


def _answers(pipes: list[Any], seconds: float, lost: Collection[int]) -> list[Any]:
    answers: dict[int, Any] = dict.fromkeys(lost)
    while len(answers) < len(pipes):
        left = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = multiprocessing.connection.wait(left, timeout=seconds)
        assert ready, f"ranks {[pipes.index(pipe) for pipe in left]} did not end in {seconds} s"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failed, answer = pipe.recv()  # type: ignore[union-attr, call-arg]
            except EOFError:
                raise AssertionError(f"rank {rank} is gone") from None
            assert not failed, f"rank {rank}:\n{answer}"
            answers[rank] = answer
    return [answers[rank] for rank in range(len(pipes))]


def _one(
    rank: int,
    ranks: int,
    folder: Path,
    seconds: float,
    pipe: Any,
    together: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    ends_with(os.getppid(), seconds + 2 * SECONDS)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        store = c10d.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds))
        answer = function(rank, *args)
        if together:
            dist.barrier()
        pipe.send((False, answer))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
