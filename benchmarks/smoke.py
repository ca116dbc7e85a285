"""Check in a minute that memgraph works on this GPU: a process and a line for each case.

    python -m benchmarks.smoke [CASE ...] [--seconds 60]

    ok      attention    7.2 s  A100, torch 2.11.0, triton 3.6.0: 31.2 MB measured of 31.2 forecast, bits as eager's
    FAILED  norms        9.0 s  A100, torch 2.11.0, triton 3.6.0: ended by SIGSEGV

A fault of the device ends only one case, and each case has a time limit. Each line is also written to a file of JSON
lines at once. `make gpu` begins with this. The cases are in `smoke_cases.py`.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
CASES = ("attention", "norms", "offload", "half", "far_home", "recording")
COMMAND = (sys.executable, "-X", "faulthandler", "-m", "benchmarks.smoke_cases")
AT_ONCE = 3  # most of a case's time is Python's
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
    about = described()
    if isinstance(about, str) or (about[0] == "cpu" and not given.cpu):
        why = f": {about}" if isinstance(about, str) else ""
        print(f"the smoke wants a CUDA device, and the torch of {sys.executable} sees none{why}", file=sys.stderr)
        return 1
    lines = run(given.cases or CASES, about, given.seconds, given.into)
    return int(not all(line.ok for line in lines))


def described() -> tuple[str, str, str] | str:
    """Describe the device, torch and triton; or the error that torch raised."""
    said = subprocess.run([sys.executable, "-c", ABOUT], capture_output=True, text=True, check=False, timeout=120)
    if said.returncode:
        return said.stderr.strip().rpartition("\n")[2]
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
    lines, until = [], time.monotonic() + seconds
    with ThreadPoolExecutor(AT_ONCE) as pool, (folder / f"smoke-{date}.jsonl").open("w") as file:
        for ended in as_completed([pool.submit(_line, case, about, until) for case in cases]):
            lines.append(ended.result())
            print(lines[-1], flush=True)
            print(json.dumps(asdict(lines[-1])), file=file, flush=True)
    return lines


def _line(case: str, about: tuple[str, str, str], until: float) -> Line:
    """Run a case in its own process, until its time is over."""
    begin = time.monotonic()
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": with_root()}
    with subprocess.Popen(
        [*COMMAND, case, about[0]], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=max(0.1, until - begin))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Line(case, False, time.monotonic() - begin, "has not ended in its time", *about)
    found = out.strip().rpartition("\n")[2] if not process.returncode else _why(process.returncode, err)
    return Line(case, not process.returncode, time.monotonic() - begin, found, *about)


def _why(code: int, err: str) -> str:
    last = err.strip().rpartition("\n")[2]
    return f"ended by {signal.Signals(-code).name}" if code < 0 else last or f"ended with {code}"


if __name__ == "__main__":
    sys.exit(main())
