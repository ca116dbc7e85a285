"""Write the results of a benchmark, with machine and versions, to a JSON file that later runs extend.

write("planner", "simulated", rows)   ->   results/planner.json: {"simulated": {"date": ..., "rows": [...]}}
Run(cuda, "gpu").write({"rows": rows})    ->   results/nvidia-h200/2026-01-31T120000Z.json
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import passes
from memgraph.system.setting import driver

FOLDER = Path(__file__).parent / "results"
CPUS = Path("/proc/cpuinfo")


def write(name: str, part: str, rows: list[Any]) -> Path:
    """Write a section of a benchmark's file; it replaces that of an earlier run."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    whole = json.loads(path.read_text()) if path.is_file() else {}
    whole[part] = {**surroundings(name), "rows": rows}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path


class Run:
    """A file for the results of one run on a device, written again after each result."""

    def __init__(self, device: torch.device, benchmark: str) -> None:
        self.about = {**surroundings(benchmark), **_of(device)}
        self.path = FOLDER / slug(_name(device)) / f"{self.about['date'].replace(':', '').replace('+0000', 'Z')}.json"

    def write(self, found: dict[str, Any]) -> Path:
        """Replace the file atomically, so that a run that is stopped leaves a whole one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({**self.about, **found}, indent=1) + "\n")
        return new.replace(self.path)


def slug(machine: str) -> str:
    """Return a file name for a device or a machine."""
    return re.sub("[^a-z0-9]+", "-", machine.lower()).strip("-")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _of(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    facts = torch.cuda.get_device_properties(device)
    return {"device": facts.name, "bytes": facts.total_memory, "driver": driver(), "cuda": torch.version.cuda}


def surroundings(benchmark: str = "planner") -> dict[str, Any]:
    """Describe the machine, the versions, and the command line."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_processor()}",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "commit": _commit(),
        "planner": _digest(),
        **{package: _version(package) for package in ("torch", "triton", "highspy", "transformers", "fairscale")},
    }


def _commit() -> str:
    """Return the commit, with a + if memgraph's own sources differ from it; "unknown" outside of a clone."""
    try:
        changed = _git("status", "--porcelain", "--", "memgraph", "passes")
        return _git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    root = FOLDER.parents[1]
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _digest() -> str:
    """Return a digest of passes/, because figures of different sources can't be compared."""
    files = sorted(Path(passes.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _processor() -> str:
    names = [line for line in CPUS.read_text().splitlines() if line.startswith("model name")] if CPUS.is_file() else []
    return names[0].partition(":")[2].strip() if names else "unknown processor"
