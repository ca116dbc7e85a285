"""A second process finds captures and plans on disk, and trains to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
STEP = """
import hashlib, json, os, torch, memgraph
from torch import nn
from memgraph.capture import trace_call
from memgraph.planning import later_step
from memgraph.system import disturbance

disturbance.LIMIT = 2.0  # prices of a busy machine would be measured again, and the step planned
counts = {"traces": 0, "planned": 0}
def counted(owner, name, what):
    function = getattr(owner, name)
    def count(*given, **named):
        counts[what] += 1
        return function(*given, **named)
    setattr(owner, name, count)

counted(trace_call, "trace_joint", "traces")
counted(later_step, "plan_accumulated", "planned")
torch.manual_seed(0)
layers = [layer for _ in range(2) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
model = nn.Sequential(*layers, nn.Linear(32, 1))
x = torch.randn(256, 32)
compiled = memgraph.compile(model, budget=int(os.environ["BUDGET"]), offload=None)
digest = hashlib.sha256()
for _ in range(2):
    compiled(x).sum().backward()
    for parameter in model.parameters():
        digest.update(parameter.grad.numpy().tobytes())
report = compiled.plan
assert report.plan and report.measured <= report.peak <= report.budget
print(json.dumps({**counts, "bits": digest.hexdigest(), "plan": [str(decision) for decision in report.plan]}))
"""


def process(folder: Path, **environment: str) -> subprocess.Popen[str]:
    there = {**os.environ, "MEMGRAPH_CACHE": str(folder), "BUDGET": "230000", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen([sys.executable, "-c", STEP], stdout=subprocess.PIPE, text=True, env=there)


def printed(running: subprocess.Popen[str]) -> dict[str, Any]:
    output = running.communicate()[0]
    assert running.returncode == 0
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def test_a_second_process_neither_traces_nor_plans(tmp_path: Path) -> None:
    first = printed(process(tmp_path))
    second, without = map(printed, (process(tmp_path), process(tmp_path, MEMGRAPH_CAPTURE_CACHE="0")))
    assert first["traces"] == without["traces"] > 0
    assert first["planned"] > 0
    assert (second["traces"], second["planned"]) == (0, 0)
    assert second["bits"] == without["bits"] == first["bits"]
