"""The lines of the stages of a device: what began, what came of it, and what is to run again.

    log = Log(path, about)
    log.add("tests", "arena")                                           it begins
    log.add("tests", "arena", ok=True, seconds=61.2, found="29 passed")    it has ended, and does not run again
    log.histories("tests")["arena"].result   ->   Result(ok=True, seconds=61.2, found="29 passed")

A unit that has begun and has no other line may have taken the machine with it. A line with `undone` says that it is to
run again, and why; one with `again`, that what stands above it does not count.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = ("memgraph", "passes", "benchmarks", "tests/gpu", "tests/kernels", "tests/support")
LEFT = 75  # the exit status of a unit, and of a stage, that wants another run
TRIES = 2  # of a unit that ends with the machine, or is not done in all of its time
CUT = "cut"  # undone, since the time of the stage was over before that of the unit
STOPPED = "stopped"  # undone, by a signal to the stage
LATE = "late"  # undone, although it had all of its time


@dataclass(frozen=True)
class Result:
    """The end of a unit; `undone`, if it is to run again, is one of CUT, STOPPED and LATE."""

    ok: bool
    seconds: float
    found: str
    undone: str = ""


@dataclass
class History:
    """The past of a unit: what earlier calls have written of it."""

    result: Result | None = None
    begun: int = 0  # times that it has begun, without an end that is known
    cut: bool = False

    @property
    def has_failed(self) -> bool:
        return self.begun >= TRIES if self.result is None else not self.result.ok


class Log:
    """The lines of all stages on a device; those of other sources or versions do not count."""

    def __init__(self, path: Path, about: Sequence[str]) -> None:
        self.path, self.about = path, [*about, digest()]
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, stage: str, unit: str, **found: Any) -> None:
        """Append a line."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"stage": stage, "unit": unit, "date": date, "about": self.about, **found}
        with self.path.open("a") as file:
            file.write(f"\n{json.dumps(line)}")  # behind a line that a stopped machine has cut
            file.flush()
            os.fsync(file.fileno())  # the next thing may be a machine that stops

    def end(self, stage: str, unit: str, result: Result) -> None:
        """Append the line of a unit that has ended, or is to run again."""
        kind = {"undone": result.undone} if result.undone else {"ok": result.ok}
        self.add(stage, unit, **kind, seconds=round(result.seconds, 3), found=result.found)

    def histories(self, stage: str) -> dict[str, History]:
        """Return what the lines of a stage say of each unit."""
        found: dict[str, History] = defaultdict(History)
        for line in self.lines(stage):
            one = found[line["unit"]]
            if "again" in line:
                found[line["unit"]] = History()
            elif "ok" in line:
                one.result, one.begun = Result(line["ok"], line["seconds"], line["found"]), 0
            elif "undone" in line:
                one.begun -= line["undone"] != LATE and one.begun > 0
                one.cut |= line["undone"] == CUT
            else:
                one.begun += 1
        return found

    def lines(self, stage: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of a stage; what a stopped machine has cut, or anyone has written, is left out."""
        for text in self.path.read_bytes().splitlines() if self.path.is_file() else []:
            try:
                line = json.loads(text)
            except ValueError:  # of a text that is not UTF-8, too
                continue
            if isinstance(line, dict) and _whole(line) and (line["stage"], line["about"]) == (stage, self.about):
                yield line


def _whole(line: dict[str, Any]) -> bool:
    """Return True if a line has what is read of it."""
    kinds: dict[str, type | tuple[type, ...]] = {"stage": str, "unit": str, "about": list}
    kinds |= {"ok": bool, "seconds": (int, float), "found": str} if "ok" in line else {}
    return all(isinstance(line.get(name), kind) for name, kind in kinds.items())


def digest() -> str:
    """Return a digest of the sources, since lines of other ones say nothing of these."""
    files = [file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
