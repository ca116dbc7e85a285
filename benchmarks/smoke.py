"""Check in a minute that memgraph works on this GPU: a process and a line for each case.

    python -m benchmarks.smoke [CASE ...] [--seconds 60]

    ok      attention    7.2 s  A100, torch 2.11.0, triton 3.6.0: 31.2 MB measured of 31.2 forecast, bits as eager's
    FAILED  norms        9.0 s  A100, torch 2.11.0, triton 3.6.0: ended by SIGSEGV; .../smoke-norms.txt has its stderr

A fault of the device ends only one case, and each case has a time limit. Each line is also written to a file of JSON
lines at once, and stderr of each case is in .gpu-cache/logs. `make gpu` begins with this. The cases are in
`smoke_cases.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.fake_cuda.described_device import is_described
from benchmarks.last_words import FATAL, last_words

ROOT = Path(__file__).parents[1]
LOGS = ROOT / ".gpu-cache" / "logs"
CASES = ("attention", "norms", "offload", "half", "far_home", "recording")
GPU_ONLY = ("recording",)  # a CPU has no CUDA graphs
COMMAND = (sys.executable, "-X", "faulthandler", "-m", "benchmarks.smoke_cases")
AT_ONCE = 3  # most of a case's time is Python's
ASKED = 120.0  # seconds in which torch must say which device there is
ABOUT = """
import json, torch
from importlib.metadata import version
name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
print(json.dumps([name, torch.__version__, version("triton")]))
"""


@dataclass(frozen=True)
class Line:
    """The result of a case, with device and versions."""

    case: str
    ok: bool
    seconds: float
    found: str
    device: str
    torch: str
    triton: str

    def __str__(self) -> str:
        about = f"{self.device}, torch {self.torch}, triton {self.triton}"
        return f"{'ok' if self.ok else 'FAILED':<7} {self.case:<10} {self.seconds:>5.1f} s  {about}: {self.found}"


def main() -> int:
    """Run the cases and print a line each; 1 if one fails, or if there is no CUDA device."""
    parser = argparse.ArgumentParser(description="a minute on a GPU")
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each case, from the beginning of all")
    parser.add_argument("--cpu", action="store_true", help="on a CPU, to see that the cases work")
    parser.add_argument("--into", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the file")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no case is called {', '.join(sorted(unknown))}; these are: {', '.join(CASES)}")
    about = device_or_reason("the smoke", given.cpu)
    if isinstance(about, str):
        print(about, file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cases are in groups of their own, and are to end, too
    try:
        lines = run(given.cases or _cases(about[0]), about, given.seconds, given.into)
    except KeyboardInterrupt:
        print("the smoke was stopped, and its cases with it", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        print(f"the smoke can't go on: {error}", file=sys.stderr)
        return 1
    if failed := [f"{line.case}: {line.found}" for line in lines if not line.ok]:
        print(f"FAILED {len(failed)} of {len(lines)}; {'; '.join(failed)}")  # a stage keeps the last line
    return int(bool(failed))


def _cases(device: str) -> list[str]:
    return [case for case in CASES if device != "cpu" or case not in GPU_ONLY]


def device_or_reason(who: str, cpu: bool = False) -> tuple[str, str, str] | str:
    """Return device, torch and triton; or a line that says why `who`, which writes figures of a device, can't run."""
    if is_described():
        return f"{who} wants a CUDA device, and this one is described: its lines would stand among those of a real one"
    about = described()
    if not isinstance(about, str) and (about[0] != "cpu" or cpu):
        return about
    why = f": {about}" if isinstance(about, str) else ""
    return f"{who} wants a CUDA device, and the torch of {sys.executable} sees none{why}"


def described() -> tuple[str, str, str] | str:
    """Describe the device, torch and triton; or the error that torch raised."""
    try:
        said = subprocess.run([sys.executable, "-c", ABOUT], capture_output=True, text=True, check=False, timeout=ASKED)
    except subprocess.TimeoutExpired:
        return f"it has not answered in {ASKED:.0f} s"
    if said.returncode:
        return last_words(said.stderr)
    device, torch, triton = json.loads(said.stdout.splitlines()[-1])
    return device, torch, triton


def with_root() -> str:
    """Return PYTHONPATH with this folder first."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(cases: Sequence[str], about: tuple[str, str, str], seconds: float, into: Path) -> list[Line]:
    """Run the cases; print and write a line when each one ends."""
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")
    folder = into / re.sub("[^a-z0-9]+", "-", about[0].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    lines, until = [], time.monotonic() + seconds
    processes: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(AT_ONCE) as pool, (folder / f"smoke-{date}.jsonl").open("w") as file:
        cases_run = [pool.submit(_line, case, about, until, processes) for case in cases]
        with _ended_with_this(pool, cases_run, processes):
            for ended in as_completed(cases_run):
                lines.append(ended.result())
                print(lines[-1], flush=True)
                print(json.dumps(asdict(lines[-1])), file=file, flush=True)
    return lines


@contextmanager
def _ended_with_this(
    pool: ThreadPoolExecutor, cases: Sequence[Future[Line]], processes: Sequence[subprocess.Popen[str]]
) -> Iterator[None]:
    """End what runs if the body is stopped, or fails."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(case.done() for case in cases):  # one may be about to start
            for process in [one for one in processes if one.poll() is None]:
                _kill(process)
            time.sleep(0.05)
        raise


def _line(case: str, about: tuple[str, str, str], until: float, processes: list[subprocess.Popen[str]]) -> Line:
    """Run a case in its own process, until its time is over."""
    begin = time.monotonic()
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": with_root()}
    said = LOGS / f"smoke-{case}.txt"
    with said.open("w") as err, subprocess.Popen(
        [*COMMAND, case, about[0]], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=err,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        processes.append(process)
        try:
            out, code = process.communicate(timeout=max(0.1, until - begin))[0], process.returncode
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            out, code = "", None
    found = out.strip().rpartition("\n")[2] if code == 0 else _why(code, said)
    return Line(case, code == 0, time.monotonic() - begin, found, *about)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _why(code: int | None, said: Path) -> str:
    """Say why a case has failed: its signal or its exception, and where all that it said to stderr is."""
    text = said.read_text(errors="replace")
    words = last_words(text)[:300]
    if code is None:
        why = "has not ended in its time"
    elif code < 0:
        why = f"ended by {signal.Signals(-code).name}" + (f": {words}" if words and not words.startswith(FATAL) else "")
    else:
        why = words or f"ended with {code}"
    return f"{why}; {said} has its stderr" if text else why


if __name__ == "__main__":
    sys.exit(main())
