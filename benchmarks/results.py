"""What a benchmark found, with what it was found on: a file of JSON that later runs add to.

write("planner", "simulated", rows)   ->   results/planner.json: {"simulated": {"date": ..., "rows": [...]}}
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import passes

FOLDER = Path(__file__).parent / "results"
CPUS = Path("/proc/cpuinfo")


def write(name: str, part: str, rows: list[Any]) -> Path:
    """Put a part into the file of a benchmark, in the place of what an earlier run put there."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    whole = json.loads(path.read_text()) if path.is_file() else {}
    whole[part] = {**surroundings(), "rows": rows}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path


def surroundings() -> dict[str, Any]:
    """The machine, the versions, and what was asked."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", "benchmarks.planner", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_processor()}",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "planner": _digest(),
        **{package: version(package) for package in ("torch", "highspy", "transformers")},
    }


def _digest() -> str:
    """Which passes it was: figures of other ones are not to be compared with these."""
    files = sorted(Path(passes.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _processor() -> str:
    names = [line for line in CPUS.read_text().splitlines() if line.startswith("model name")] if CPUS.is_file() else []
    return names[0].partition(":")[2].strip() if names else "unknown processor"
