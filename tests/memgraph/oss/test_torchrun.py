"""Started with torchrun, whose report names a rank that dies; one that is stopped, and wakes, learns that the others went on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import optim

import memgraph
from memgraph import CollectiveError
from tests.memgraph.oss.test_steps import groups, net, train
from tests.support.ranks import on_ranks

ROOT = Path(__file__).parents[3]
SECONDS = 8.0
PROGRAM = """
import datetime, os, signal, sys
import torch, torch.distributed as dist
import memgraph

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
torch.manual_seed(0)
model = torch.nn.Linear(64, 8)
optimizer = memgraph.OSS(model.parameters(), lr=3e-4)
for step in range(4):
    model(torch.randn(4, 64)).square().mean().backward()
    if step == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else os._exit(0)
    optimizer.step()
    optimizer.zero_grad()
"""


def _run(how: str, program: Path) -> str:
    program.write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(program),
        how,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode != 0
    return ended.stderr


@pytest.mark.slow
def test_a_rank_that_dies_under_torchrun_is_named_and_all_of_them_end(tmp_path: Path) -> None:
    killed = _run("killed", tmp_path / "train.py").partition("Root Cause")[2]
    assert "rank      : 1" in killed and "Signal 9 (SIGKILL)" in killed
    # torchrun does not mind who ends without an error: the others do.
    assert "has failed: rank 1 is gone or stopped: no sign of life for 3 s" in _run("left", tmp_path / "train.py")


def _stopped(rank: int, texts: Path) -> str:
    module = net()
    optimizer = memgraph.OSS(groups(module), optim.Adam)
    train(module, optimizer, 2)
    if rank == 1:
        process = os.getpid()
        wakes = ["sh", "-c", f"while [ ! -e {texts} ]; do sleep 0.1; done; kill -CONT {process}"]
        subprocess.Popen(wakes)
        os.kill(process, signal.SIGSTOP)
    with pytest.raises(CollectiveError) as caught:
        train(module, optimizer, 1)
    assert caught.value.ranks == (1,)
    texts.write_text("")
    time.sleep(0 if rank == 1 else SECONDS)  # the connections are there when it wakes
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_was_stopped_learns_that_the_others_have_gone_on(tmp_path: Path) -> None:
    first, own, last = on_ranks(3, _stopped, tmp_path / "told", seconds=SECONDS, meet=False)
    reason = "rank 1 is gone or stopped: no sign of life for 3 s"
    for text in (first, last):
        assert f"has failed: {reason}; look into the log of that process and start again" in text
    assert f"the others have gone on without rank 1, which is this process ({reason}); see why it was stopped" in own
