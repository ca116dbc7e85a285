"""Stock architectures of six libraries, each in a process of its own, beside eager at shares of its activations.

    python -m benchmarks.zoo [--only NAME] [--library timm] [--jobs 2] [--quick] [--device cuda]

    ok       mixtral                60 %  guards     4.1 s   2.71 MB counted of 2.72 forecast
    refused  reformer               60 %  CaptureError: ...

results/zoo.json and results/zoo.md are written after each architecture; what they have of the same code is not run
again, but for `--only`.  `pip install memgraph[zoo]` has the libraries; those that are absent are left out.  With
`--device described` torch's CUDA build takes the ops of an H200 that is not there, and the host computes them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.fake_cuda.described_device import environment
from benchmarks.last_words import last_words
from benchmarks.records import FOLDER, slug, surroundings
from benchmarks.smoke import device_or_reason
from tests.support.allocator_meter import preloaded

from .architectures import ARCHITECTURES, QUICK
from .libraries import LIBRARIES
from .row import Row
from .table import markdown, summary

ROOT = Path(__file__).parents[2]
SHARES = (1.2, 0.6, 0.4)
VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
DESCRIBED = "described"
NAMES = {"cpu": "", DESCRIBED: "H200 as described"}


def main() -> int:
    """Run what is asked for, print a line for each training and a summary; 1 if one failed, is wrong or over budget."""
    parser = argparse.ArgumentParser(description="stock architectures under budgets, beside eager")
    parser.add_argument("--only", action="append", choices=list(ARCHITECTURES), help="run this one, again if need be")
    parser.add_argument("--library", choices=LIBRARIES)
    parser.add_argument("--share", action="append", type=float, help=f"of eager's activations; by default {SHARES}")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} at one budget; nothing is written")
    parser.add_argument("--device", choices=("cpu", "cuda", DESCRIBED), default="cpu")
    parser.add_argument("--seconds", type=float, default=900.0, help="for each architecture")
    parser.add_argument("--into", type=Path, help="folder of zoo.json and zoo.md; by default that of the device")
    given = parser.parse_args()
    names = given.only or (QUICK if given.quick else list(ARCHITECTURES))
    names = [name for name in names if given.library in (None, ARCHITECTURES[name].library)]
    absent = {name for name in LIBRARIES if find_spec(name) is None}
    names = [name for name in names if ARCHITECTURES[name].library not in absent]
    if given.device == "cuda" and isinstance(reason := device_or_reason("the zoo"), str):
        print(reason)
        return 1
    device = torch.cuda.get_device_name() if given.device == "cuda" else NAMES[given.device]
    record = Record(given.into or FOLDER / slug(device), device, quick=given.quick)
    shares = given.share or ((0.6,) if given.quick else SHARES)
    done = set() if given.only else record.done
    wanted = {name: [share for share in shares if (name, share) not in done] for name in names}
    found = run(wanted, given.device, given.jobs, given.seconds, record)
    print(*summary(found if given.quick else record.rows), sep="\n")
    return int(any(row.verdict in ("failed", "wrong", "over") for row in found))


class Record:
    """The rows of all architectures, each with the code that it was found with, as JSON and as Markdown."""

    def __init__(self, folder: Path, device: str, quick: bool) -> None:
        self.path, self.device, self.quick, self.code = folder / "zoo.json", device, quick, _digest()
        self.entries = json.loads(self.path.read_text())["rows"] if self.path.is_file() else []

    @property
    def done(self) -> set[tuple[str, float]]:
        """Return what was run with this code; nothing in a quick run."""
        same = [] if self.quick else [entry for entry in self.entries if entry["code"] == self.code]
        return {(entry["name"], entry["share"]) for entry in same}

    @property
    def rows(self) -> list[Row]:
        plain = ({key: value for key, value in entry.items() if key != "code"} for entry in self.entries)
        return [Row(**{**entry, "different": tuple(entry["different"])}) for entry in plain]

    def add(self, rows: Sequence[Row]) -> None:
        """Put the rows of an architecture in the place of those that an earlier run found."""
        if self.quick:
            return
        found = {(row.name, row.share) for row in rows}
        kept = [entry for entry in self.entries if (entry["name"], entry["share"]) not in found]
        order = list(ARCHITECTURES)
        added = [{**asdict(row), "code": self.code} for row in rows]
        self.entries = sorted([*kept, *added], key=lambda entry: (order.index(entry["name"]), -entry["share"]))
        about = {**surroundings("zoo"), "packages": list(LIBRARIES)} | {name: _version(name) for name in LIBRARIES}
        about["machine"] = ", ".join(filter(None, [self.device, about["machine"]]))
        about["codes"] = sorted({entry["code"] for entry in self.entries})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**about, "rows": self.entries}, indent=1) + "\n")
        self.path.with_suffix(".md").write_text(markdown(self.rows, about))


def run(wanted: Mapping[str, Sequence[float]], device: str, jobs: int, seconds: float, record: Record) -> list[Row]:
    """Run architectures at their shares, print and record the rows of each as it ends."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        own = _environment(device, Path(folder)) | VARIABLES
        for ended in as_completed(
            [pool.submit(_child, device, name, shares, seconds, own) for name, shares in wanted.items() if shares]
        ):
            rows = ended.result()
            record.add(rows)
            found += rows
            print(*map(_line, rows), sep="\n", flush=True)
    return found


def _environment(device: str, folder: Path) -> dict[str, str]:
    """Return the environment of a process that trains on a device; build what it preloads."""
    if device == "cpu":
        return preloaded(folder)
    return environment("h200") if device == DESCRIBED else dict(os.environ)


def _child(device: str, name: str, shares: Sequence[float], seconds: float, inherited: dict[str, str]) -> list[Row]:
    """Return the rows that a process has found until its time was over, and one for each share that it has not."""
    child = "benchmarks.zoo.child", "cpu" if device == "cpu" else "cuda", name, *map(str, shares)
    modules = ("benchmarks.fake_cuda.host_kernels", *child) if device == DESCRIBED else child
    command = [sys.executable, "-m", *modules]
    with (
        tempfile.TemporaryDirectory() as cache,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        own = inherited | {"MEMGRAPH_CACHE": cache}  # no price is known before
        try:
            code = subprocess.run(command, cwd=ROOT, env=own, stdout=out, stderr=err, timeout=seconds, check=False)
            lost = f"ended with {code.returncode}"
        except subprocess.TimeoutExpired:
            lost = f"has not ended in {seconds:.0f} s"
        out.seek(0)
        err.seek(0)
        lines = [json.loads(line) for line in out if line.startswith("{")]
        last = last_words(err.read())
    rows = [Row(**{**line, "different": tuple(line["different"])}) for line in lines]
    missing = [share for share in shares if share not in {row.share for row in rows}]
    return rows + [Row(name, ARCHITECTURES[name].library, share, reason=f"{lost}: {last}") for share in missing]


def _line(row: Row) -> str:
    head = f"{row.verdict:<8} {row.name:<24} {row.share:>5.0%}"
    if not row.is_captured:
        return f"{head}  {row.reason}"
    counted = f"{row.counted / 1e6:.3f} MB counted of {row.forecast / 1e6:.3f} forecast, {row.budget / 1e6:.3f} allowed"
    return f"{head}  {row.state:<7} {row.seconds:5.1f} s  {counted}  {', '.join(row.different[:3])}"


def _version(package: str) -> str:
    return version(package) if find_spec(package) is not None else "absent"


def _digest() -> str:
    """Return which code it was: rows of other code are run again."""
    files = sorted(file for top in ("memgraph", "passes") for file in (ROOT / top).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
