"""Run what needs a GPU in stages, each a command that ends in time and goes on where the one before it stopped.

    python -m benchmarks.stages smoke|kernels|tests|zoo|figures [--within 540] [--failed | --again]

    ok      tests       tests/gpu/test_graphs.py   61.2 s  29 passed
    FAILED  tests       tests/gpu/test_cuda.py     12.0 s  ended by SIGSEGV; `python -m ... tests --failed` repeats it
    left    tests       tests/gpu/test_arena.py    44.1 s  the stage's time was over before its own

A stage is a list of units. Each is a process of its own, since a fault of the device ends the process that it meets,
and has a line in a file of JSON lines as soon as it ends: benchmarks/results/<device>/stages.jsonl. A unit that has a
line for these sources, this torch and this device does not run again, but with --failed or --again: these run what has
failed, or everything, once more. A unit is left to the next call where the stage's time is over before its own, where
it ends with 75 (there was no time for all that it measures), and where the stage is stopped by Ctrl-C or SIGTERM. It
has failed if it ends with another status, hangs for all of its time, twice is not done in all of its time, or twice
begins and never ends, since it may take the machine with it.

The exit status is 0 if all units of the stage are ok, 1 if one has failed, and 75 if some are left: the same command
goes on. What is compiled, and what units say, stays in .gpu-cache. On a GPU the commands of most units have run,
and no stage has.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.last_words import last_words
from benchmarks.smoke import device_or_reason, with_root
from benchmarks.stage_log import CUT, LATE, LEFT, STOPPED, TRIES, History, Log, Result
from benchmarks.zoo.libraries import LIBRARIES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CACHE = ROOT / ".gpu-cache"
PYTEST = ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-v")
SPARE = 5.0  # seconds in which a unit that was stopped writes down what it has
ENDING = 30.0  # seconds that a unit has to end by itself, after those in which it measures
MEASURING = "{seconds}"  # in a command: the seconds in which it measures
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOKS = 0.2  # seconds between two looks for a signal
SUMMARY = re.compile(r"^FAILED |\d (passed|failed|error)")  # a last line that says all


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
    """Run a stage, and return its exit status; after a signal, end by it."""
    parser = argparse.ArgumentParser(description="a part of what needs a GPU")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--within", type=float, default=540.0, help="seconds for this call")
    repeated = parser.add_mutually_exclusive_group()
    repeated.add_argument("--failed", action="store_true", help="run units that have failed once more")
    repeated.add_argument("--again", action="store_true", help="run all units once more")
    given = parser.parse_args()
    about = device_or_reason("a stage")
    if isinstance(about, str):
        print(about, file=sys.stderr)
        return 1
    repeat = "all" if given.again else "failed" if given.failed else ""
    try:
        log = Log(RESULTS / re.sub("[^a-z0-9]+", "-", about[0].lower()).strip("-") / "stages.jsonl", about)
        status = run(given.stage, STAGES[given.stage], log, time.monotonic() + given.within, repeat)
    except OSError as error:
        print(f"a stage can't go on: {error}", file=sys.stderr)
        return 1
    if status > 128:  # so that what called it, as make does, knows
        signal.signal(status - 128, signal.SIG_DFL)
        os.kill(os.getpid(), status - 128)
    return status


def run(stage: str, units: Sequence[Unit], log: Log, until: float, repeat: str = "") -> int:
    """Run the units that have no line, and those to `repeat`; write and print a line when each one ends."""
    there = until - time.monotonic()
    before = {unit.name: _history(stage, unit, log, repeat) for unit in units}
    results: dict[str, Result] = {}
    with _noted() as signals:
        for unit in units:
            found = _known(before[unit.name])
            if found is None:
                seconds = min(unit.seconds, until - time.monotonic() - SPARE)
                if signals or seconds < _least(unit, before[unit.name]):
                    continue
                log.add(stage, unit.name)
                found = _ran(unit, seconds, signals)
                if found.undone == LATE and before[unit.name].begun + 1 >= TRIES:
                    found = replace(found, undone="")
                log.end(stage, unit.name, found)
                before[unit.name].cut |= found.undone == CUT
            results[unit.name] = found
            _show(stage, unit, found)
    left = [unit for unit in units if unit.name not in results or results[unit.name].undone]
    if left:
        _show_left(stage, {unit.name: _least(unit, before[unit.name]) for unit in left}, there)
    if signals:
        return 128 + signals[0]
    return LEFT if left else int(not all(found.ok for found in results.values()))


def _history(stage: str, unit: Unit, log: Log, repeat: str) -> History:
    history = log.histories(stage).get(unit.name, History())
    if repeat == "all" or (repeat == "failed" and history.has_failed):
        log.add(stage, unit.name, again=True)
        return History()
    return history


def _known(history: History) -> Result | None:
    """Return the result of a unit that does not run again."""
    if history.result is None and history.has_failed:
        return Result(False, 0.0, f"has begun {TRIES} times and was never done")
    return history.result


def _least(unit: Unit, history: History) -> float:
    """Return the seconds without which a unit is not begun: all of its own after one that were too few."""
    return unit.seconds if history.cut else unit.least


def _show(stage: str, unit: Unit, found: Result) -> None:
    word = "left" if found.undone else "ok" if found.ok else "FAILED"
    again = f"; `{_command(stage)} --failed` repeats it" if word == "FAILED" else ""
    print(f"{word:<7} {stage:<8} {unit.name:<32} {found.seconds:>6.1f} s  {found.found}{again}", flush=True)


def _show_left(stage: str, least: Mapping[str, float], there: float) -> None:
    """Say how to go on with units, and which ones want more time than this call had."""
    print(f"left: {', '.join(least)}; `{_command(stage)}` goes on with them", flush=True)
    want = {name: seconds for name, seconds in least.items() if seconds > there - SPARE}
    if want:
        most = math.ceil(max(want.values()) + SPARE + 1)  # a second, until the first unit begins
        print(f"with --within {most} (make: WITHIN_GPU={most}) or more, which {', '.join(want)} wants", flush=True)


def _command(stage: str) -> str:
    return f"python -m benchmarks.stages {stage}"


@contextmanager
def _noted() -> Iterator[list[int]]:
    """Note signals down, in place of ending at once, for a unit is not in the group that a terminal stops."""
    got: list[int] = []
    heeded = [one for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]  # as nohup's
    before = {one: signal.signal(one, lambda number, _: got.append(number)) for one in heeded}
    try:
        yield got
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _ran(unit: Unit, seconds: float, signals: Sequence[int]) -> Result:
    """Run a unit in a process group of its own, and stop all of it when its time is over, or at a signal."""
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
    code = _waited(process, begin + seconds, signals)
    if code is None:
        _stop(process)
    took, whole = time.monotonic() - begin, seconds >= unit.seconds
    if code is None and signals:
        return Result(False, took, f"was stopped by {signal.Signals(signals[0]).name}", STOPPED)
    if code in (None, LEFT) and not whole:
        return Result(False, took, f"the stage's time was over before its own; {said} has what it said", CUT)
    if code is None:
        return Result(False, took, f"has not ended in its {unit.seconds:.0f} s; {said} has what it said")
    if code == LEFT:
        return Result(False, took, f"is not done in its {unit.seconds:.0f} s; {said} has what it said", LATE)
    return Result(not code, took, _why(code, said))


def _waited(process: subprocess.Popen[bytes], until: float, signals: Sequence[int]) -> int | None:
    """Return the exit status; None at a signal, or when the time is over."""
    while not signals and (left := until - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(min(left, LOOKS))
    return None


def _why(code: int, said: Path) -> str:
    text = said.read_text(errors="replace").strip()
    last = text.rpartition("\n")[2]
    if not code:
        return last[:200]
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    words = last if SUMMARY.search(last) else last_words(text)
    return f"{how}; {said} has what it said: {words[:200]}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a group of processes to end, so that they write down what they have; then end it."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGINT)
        process.wait(SPARE)
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):  # of the group, none may be left
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(SPARE)


if __name__ == "__main__":
    sys.exit(main())
