"""What a benchmark found, with what it was found on: a file of JSON that later runs add to.

write("planner", "simulated", rows)   ->   results/planner.json: {"simulated": {"date": ..., "rows": [...]}}
Run(cuda, "gpu").write({"rows": rows})    ->   results/nvidia-h200/2026-01-31T120000Z.json
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
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
    """Put a part into the file of a benchmark, in the place of what an earlier run put there."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    whole = json.loads(path.read_text()) if path.is_file() else {}
    whole[part] = {**surroundings(name), "rows": rows}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path


class Run:
    """A file of its own for what one run finds on a device; it may be written again whenever more is found."""

    def __init__(self, device: torch.device, benchmark: str) -> None:
        self.about = {**surroundings(benchmark), **_of(device)}
        self.path = FOLDER / slug(device) / f"{self.about['date'].replace(':', '').replace('+0000', 'Z')}.json"

    def write(self, found: dict[str, Any]) -> Path:
        """What was found so far, in the place of what was there; whoever stops this run finds one or the other."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({**self.about, **found}, indent=1) + "\n")
        return new.replace(self.path)


def slug(device: torch.device) -> str:
    """The device as the name of a folder."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def _of(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    facts = torch.cuda.get_device_properties(device)
    return {"device": facts.name, "bytes": facts.total_memory, "driver": driver(), "cuda": torch.version.cuda}


def surroundings(benchmark: str = "planner") -> dict[str, Any]:
    """The machine, the versions, and what was asked."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_processor()}",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "planner": _digest(),
        **{package: _version(package) for package in ("torch", "triton", "highspy", "transformers", "fairscale")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _digest() -> str:
    """Which passes it was: figures of other ones are not to be compared with these."""
    files = sorted(Path(passes.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _processor() -> str:
    names = [line for line in CPUS.read_text().splitlines() if line.startswith("model name")] if CPUS.is_file() else []
    return names[0].partition(":")[2].strip() if names else "unknown processor"
