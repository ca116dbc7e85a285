"""Run what needs a GPU in stages, each a command that ends in time and goes on where the one before it stopped.

    python -m benchmarks.stages smoke|kernels|tests|zoo|figures [--within 540] [--again]

    ok      tests       tests/gpu/test_graphs.py   61.2 s  29 passed
    FAILED  tests       tests/gpu/test_cuda.py     12.0 s  ended by SIGSEGV

A stage is a list of units. Each is a process of its own, since a fault of the device ends the process that it meets,
and has a line in a file of JSON lines as soon as it ends: benchmarks/results/<device>/stages.jsonl. A unit that has a
line for these sources, this torch and this device does not run again; one that twice began and never ended has failed,
since it may take the machine with it. The exit status is 0 if all units of the stage are ok, 1 if one has failed, and
75 if there was no time for some: the same command goes on. What is compiled, and what units say, stays in .gpu-cache.
On a GPU, the smoke has run as a stage, and the others have not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.smoke import described, with_root
from benchmarks.zoo.training import LIBRARIES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CACHE = ROOT / ".gpu-cache"
PYTEST = ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-v")
LEFT = 75  # the exit status of a stage that wants another call
TRIES = 2  # of a unit that ends with the machine
SPARE = 5.0  # seconds in which a unit that was stopped writes down what it has
ENDING = 30.0  # seconds that a unit has to end by itself, after those in which it measures
MEASURING = "{seconds}"  # in a command: the seconds in which it measures
SOURCES = ("memgraph", "passes", "benchmarks", "tests/gpu", "tests/kernels")


@dataclass(frozen=True)
class Unit:
    """A command of Python, and the most seconds that it may take; it is not begun with less than `least`."""

    name: str
    command: tuple[str, ...]
    seconds: float
    least: float = 30.0


def _tests(path: str, seconds: float) -> Unit:
    return Unit(path, (*PYTEST, path), seconds)


def _figures(part: str, seconds: float, least: float) -> Unit:
    return Unit(part, ("-m", "benchmarks.gpu", "--part", part, "--seconds", MEASURING), seconds, least)


def _zoo(library: str) -> Unit:
    command = ("-m", "benchmarks.zoo", "--device", "cuda", "--share", "0.6", "--jobs", "8", "--seconds", "150")
    return Unit(f"zoo of {library}", (*command, "--library", library), 500.0, 120.0)


STAGES: Mapping[str, tuple[Unit, ...]] = {
    "smoke": (Unit("smoke", ("-m", "benchmarks.smoke"), 75.0),),
    "kernels": (_tests("tests/kernels", 400.0),),
    "tests": tuple(
        _tests(f"tests/gpu/test_{name}.py", 300.0) for name in ("promise", "cuda", "graphs", "offloaded_state", "arena")
    ),
    "zoo": tuple(map(_zoo, LIBRARIES)),
    "figures": (
        _figures("kernels", 120.0, 60.0),
        _figures("copies", 120.0, 60.0),
        _figures("updates", 120.0, 60.0),
        _figures("prices", 120.0, 60.0),
        _figures("arena", 300.0, 120.0),
        *(_figures(part, 500.0, 400.0) for part in ("gpt2-xl", "llama-8b", "7b-16GB", "7b-rule", "7b-8GB")),
    ),
}


def main() -> int:
    """Run a stage, and return its exit status."""
    parser = argparse.ArgumentParser(description="a part of what needs a GPU")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--within", type=float, default=540.0, help="seconds for this call")
    parser.add_argument("--again", action="store_true", help="run units that have a line, too")
    given = parser.parse_args()
    about = described()
    if isinstance(about, str) or about[0] == "cpu":
        why = f": {about}" if isinstance(about, str) else ""
        print(f"a stage wants a CUDA device, and the torch of {sys.executable} sees none{why}", file=sys.stderr)
        return 1
    log = Log(RESULTS / re.sub("[^a-z0-9]+", "-", about[0].lower()).strip("-") / "stages.jsonl", about)
    return run(given.stage, STAGES[given.stage], log, time.monotonic() + given.within, given.again)


class Log:
    """The lines of all stages on a device; those of other sources or versions do not count."""

    def __init__(self, path: Path, about: Sequence[str]) -> None:
        self.path, self.about = path, [*about, _digest()]
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, stage: str, unit: str, **found: Any) -> None:
        """Append a line."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"stage": stage, "unit": unit, "date": date, "about": self.about, **found}
        with self.path.open("a") as file:
            file.write(f"\n{json.dumps(line)}")  # behind a line that a stopped machine has cut
            file.flush()
            os.fsync(file.fileno())  # the next thing may be a machine that stops

    def lines(self, stage: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of a stage; one that a stopped machine has cut is left out."""
        for text in self.path.read_text().splitlines() if self.path.is_file() else []:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line["stage"] == stage and line["about"] == self.about:
                yield line


@dataclass(frozen=True)
class Result:
    """The end of a unit."""

    ok: bool
    seconds: float
    found: str


def run(stage: str, units: Sequence[Unit], log: Log, until: float, again: bool = False) -> int:
    """Run the units that have no line; write and print a line when each one ends."""
    before = [] if again else list(log.lines(stage))
    ended = {line["unit"]: Result(line["ok"], line["seconds"], line["found"]) for line in before if "ok" in line}
    begun = Counter(line["unit"] for line in before if "ok" not in line)
    left = []
    for unit in units:
        result = ended.get(unit.name)
        if result is None and begun[unit.name] >= TRIES:
            result = Result(False, 0.0, f"has begun {TRIES} times and never ended")
        elif result is None:
            seconds = min(unit.seconds, until - time.monotonic() - SPARE)
            if seconds < unit.least:
                left.append(unit.name)
                continue
            log.add(stage, unit.name)
            result = _ran(unit, seconds)
            log.add(stage, unit.name, **asdict(result))
        ended[unit.name] = result
        print(
            f"{'ok' if result.ok else 'FAILED':<7} {stage:<8} {unit.name:<32} {result.seconds:>6.1f} s  {result.found}",
            flush=True,
        )
    if left:
        print(f"no time for {', '.join(left)}: the same command goes on with them", flush=True)
    failed = any(not ended[unit.name].ok for unit in units if unit.name in ended)
    return LEFT if left else int(failed)


def _ran(unit: Unit, seconds: float) -> Result:
    """Run a unit in a process group of its own, and stop all of it when its time is over."""
    begin = time.monotonic()
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"), "TRITON_CACHE_DIR": str(CACHE / "triton"), **os.environ,
        "PYTHONPATH": with_root(), "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip
    said = CACHE / "logs" / f"{re.sub('[^a-z0-9]+', '-', unit.name.lower())}.txt"
    said.parent.mkdir(parents=True, exist_ok=True)
    with said.open("wb") as file:  # and no pipe, which what hangs would keep open
        process = subprocess.Popen(
            [sys.executable, *(word.replace(MEASURING, f"{seconds - ENDING:.0f}") for word in unit.command)],
            cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        _stop(process)
        return Result(False, time.monotonic() - begin, f"has not ended in its time; {said} has what it said")
    last = said.read_text(errors="replace").strip().rpartition("\n")[2][:200]
    why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return Result(not code, time.monotonic() - begin, f"{why}; {said} has what it said: {last}" if code else last)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a group of processes to end, so that they write down what they have; then end it."""
    with suppress(subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGINT)
        process.wait(SPARE)
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):  # of the group, none may be left
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(SPARE)


def _digest() -> str:
    """Return a digest of the sources, since lines of other ones say nothing of these."""
    files = [file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
