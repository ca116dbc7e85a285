"""Core tests on each torch and Python that memgraph is said to work with, with the build of torch that pip takes.

    python -m benchmarks.versions [2.11 3.13/2.15 ...]      an environment for each in .venv-versions, and a row:

    python  torch   triton  passed  failed  xfailed  left  seconds
    3.13.0  2.15.0  3.9.0      472       0        4     0      171

    python -m benchmarks.versions newest --python other --optional --within 720    what CI asks

Without a Python before the slash it is that of `--python`: `other` is the newest that is not the one that runs this.
It is looked for on PATH and among those of pyenv.  `left` are tests that had no time.  With `--optional`, what can't be
found or installed in time is no failure, because CI must not wait for a registry.  A CUDA build of torch takes 6 GB,
so each environment goes once its row is there, unless `--keep` is given.  This file imports only the standard library,
because there is no environment yet.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-versions"
VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
PYTHONS = ("3.11", "3.12", "3.13")
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
NEWEST, OTHER = "newest", "other"
WANTED = ("numpy", "highspy", "safetensors", "rich", "typer", "networkx", "psutil", "transformers", "expecttest")
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
UNBOUND = ("torch", "triton", "setuptools")  # each torch has its own, whatever constraints.txt says
ROOM = 8 << 30  # bytes of disk that an environment takes at most, while it is unpacked
INSTALLED = 0.6  # of the time that `--within` gives: what the tests need at least is left
ENDING = 60.0  # seconds that a test which has begun in time has to end in
LIMIT = 180  # seconds of each
ASK = "import ensurepip, sys; print(f'{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}')"
CORE = (
    "tests/test_torch_names.py",
    "tests/end_to_end/test_promise.py",
    "tests/end_to_end/test_forked_process.py",
    "tests/memgraph/tensors/test_pytree.py",
    "tests/memgraph/system/test_private_names.py",
    "tests/memgraph/system/test_device.py",
    "tests/memgraph/capture/test_capture.py",
    "tests/memgraph/capture/test_capture_errors.py",
    "tests/memgraph/capture/test_value_guards.py",
    "tests/memgraph/capture/python_state/test_side_effects.py",
    "tests/memgraph/capture/test_reinplace.py",
    "tests/memgraph/capture/python_state/test_refuse_reseeding.py",
    "tests/memgraph/capture/test_explain_errors.py",
    "tests/end_to_end/test_layers.py",
    "tests/end_to_end/test_autograd.py",
    "tests/end_to_end/test_fused_update.py",
    "tests/end_to_end/test_modes.py",
    "tests/end_to_end/test_hooks.py",
    "tests/end_to_end/test_calls.py",
    "tests/memgraph/graph/test_storages.py",
    "tests/memgraph/graph/test_law.py",
    "tests/memgraph/runtime/test_autograd_function.py",
    "tests/memgraph/runtime/test_released_outputs.py",
    "tests/memgraph/runtime/test_concurrent_runs.py",
    "tests/memgraph/optim/test_offloaded_update.py",
    "tests/memgraph/optim/test_offloaded_update_module.py",
    "tests/memgraph/optim/test_windowed_update.py",
    "tests/memgraph/api/test_compiled_module.py",
    "tests/memgraph/guards/test_signature.py",
    "tests/memgraph/kernels/test_kernels.py",
    "tests/memgraph/profile/test_cuda_dispatch.py",
    "tests/memgraph/profile/test_active_profiler.py",
)


class NotTestedError(Exception):
    """An environment could not be made, or no test has run in it, for the reason in the message."""


@dataclass(frozen=True)
class Row:
    """The results of the tests on one torch and one Python; those that are `left` had no time."""

    python: str
    torch: str
    triton: str
    passed: int
    failed: int
    xfailed: int
    left: int
    seconds: float

    def __str__(self) -> str:
        counts = f"{self.passed:>6}  {self.failed:>6}  {self.xfailed:>7}  {self.left:>4}  {self.seconds:>7.0f}"
        return f"{self.python:<7} {self.torch:<7} {self.triton:<7} {counts}"


HEADER = "python  torch   triton  passed  failed  xfailed  left  seconds"


def main() -> int:
    """Print a row for each version; 1 if a test has failed, or a version that was asked for is not there."""
    given = _arguments()
    until = time.monotonic() + given.within
    print(HEADER, flush=True)
    failed = False
    for wanted in given.versions or VERSIONS:
        python, _, version = wanted.rpartition("/")
        python = python or given.python
        place = FOLDER / f"{python}-{version}"
        try:
            its_end = time.monotonic() + INSTALLED * (until - time.monotonic())
            row = tested(installed(interpreter(python), version, place, its_end), CORE, until)
            print(row, flush=True)  # at once: removing an environment takes a while
            failed |= row.failed > 0
        except NotTestedError as error:
            print(f"\n*** torch {version} ON PYTHON {python} WAS NOT TESTED: {error} ***\n", flush=True)
            failed |= not given.optional
        finally:
            if not given.keep:
                shutil.rmtree(place, ignore_errors=True)
    return int(failed)


def interpreter(wanted: str) -> Path:
    """Return a Python of this version, or the newest `other` one than this: on PATH, or the newest of pyenv's.

    Raises:
        NotTestedError: there is none.
    """
    if wanted == OWN:
        return Path(sys.executable)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    versions = [version for version in reversed(PYTHONS) if version != OWN] if wanted == OTHER else [wanted]
    for version in versions:
        kept = sorted(pyenv.glob(f"{version}.*"), key=lambda place: [*map(int, re.findall(r"\d+", place.name))])
        for python in [shutil.which(f"python{version}"), *(place / "bin" / "python" for place in reversed(kept))]:
            if python is not None and _said([python, "-c", ASK]) == version:  # one of pyenv's on PATH may be off
                return Path(python)
    raise NotTestedError(f"there is no Python {' or '.join(versions)} with ensurepip on PATH or in {pyenv}")


def installed(base: Path, version: str, place: Path, until: float) -> Path:
    """Make an environment of this Python with this torch and the tests' packages; return its own Python.

    Raises:
        NotTestedError: the disk is too full, pip fails, or it takes longer than `until`.
    """
    python = place / "bin" / "python"
    if (place / "ready").exists():
        return python
    free = shutil.disk_usage(ROOT).free
    if free < ROOM:
        raise NotTestedError(f"it takes up to {ROOM >> 30} GB of disk, and {free >> 30} are free")
    _run([str(base), "-m", "venv", "--clear", str(place)], until)
    (place / "constraints.txt").write_text(_constraints())
    pip = [str(python), "-m", "pip", "install", "--no-cache-dir", "--quiet"]
    _run([*pip, "-c", str(place / "constraints.txt"), *WANTED, *TOOLS], until)
    _run([*pip, "--upgrade", "torch" if version == NEWEST else f"torch=={version}.*"], until)
    _run([*pip, "triton>=3.6"], until)  # as pyproject.toml asks: a CPU build of torch brings none
    _run([str(python), "-c", "import torch"], until)
    (place / "ready").touch()
    return python


def tested(python: Path, tests: Sequence[str], until: float) -> Row:
    """Run the tests in an environment, those that begin in time, and return a row.

    Raises:
        NotTestedError: none has begun, or they have not ended by then.
    """
    begin = time.monotonic()
    within = max(0.0, until - begin - ENDING)
    with TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        options = ["-p", "no:cacheprovider", f"--junitxml={found}", "-o", "addopts=--import-mode=importlib"]
        options += ["-p", "tests.support.time_limits", f"--within={within}", f"--timeout={LIMIT}"]
        wanted = ["-q", "--no-header", "-rf", "--tb=line", "-m", "not slow and not gpu and not fake_cuda"]
        with suppress(subprocess.CalledProcessError):  # failed tests are in the file
            _run([str(python), "-m", "pytest", *options, *wanted, *tests], until, shown=True)
        crashed = not found.exists()
        kinds = ["failed"] if crashed else list(map(_outcome, ElementTree.parse(found).getroot().iter("testcase")))
    passed, failed, xfailed, left = (kinds.count(kind) for kind in ("passed", "failed", "xfailed", "left"))
    if not passed + failed + xfailed:
        raise NotTestedError(f"of {len(kinds)} tests none has begun in {within:.0f} seconds")
    its_own = _said([python, "-c", "import platform; print(platform.python_version())"])
    torch, triton = (_version(python, name) for name in ("torch", "triton"))
    return Row(its_own, torch, triton, passed, failed, xfailed, left, time.monotonic() - begin)


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    if "--within" in skipped.get("message", ""):
        return "left"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def _version(python: Path, name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}).partition('+')[0])"
    return _said([python, "-c", code]) or "-"


def _said(command: Sequence[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _constraints() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if line.partition("==")[0] not in UNBOUND)


def _run(command: Sequence[str], until: float, shown: bool = False) -> None:
    """Run a command, and end all that it has started with it, and it when its time is over.

    Raises:
        NotTestedError: it has no time left, or has failed and was not to be `shown`.
        CalledProcessError: it has failed, and was `shown`.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CI": "1"}
    out = None if shown else subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=out, stderr=None if shown else subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise NotTestedError(f"{' '.join(command[1:5])} ... has not ended in its time") from None
        finally:
            with suppress(ProcessLookupError):  # what it has left, too
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode and shown:
        raise subprocess.CalledProcessError(process.returncode, list(command))
    if process.returncode:
        raise NotTestedError(f"{' '.join(command[1:5])} ... has failed: {_reason(said)}")


def _reason(said: str) -> str:
    """Return the errors in a command's output, and pip's first warning that a registry does not answer."""
    lines = said.splitlines()
    unanswered = [line.strip() for line in lines if "connection broken" in line][:1]
    errors = " | ".join(line for line in lines if "ERROR" in line)[-500:] or said[-500:].strip()
    return " | ".join([*unanswered, errors])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    known = f"of torch, or {NEWEST!r}, or of Python/of torch; by default {', '.join(VERSIONS)}"
    parser.add_argument("versions", nargs="*", help=known)
    parser.add_argument("--python", default=OWN, metavar="VERSION", help=f"{', '.join(PYTHONS)} or {OTHER!r}")
    parser.add_argument("--optional", action="store_true", help="what can't be installed in time is no failure")
    parser.add_argument("--within", type=float, default=4 * 3600.0, metavar="SECONDS", help="for all that is done")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are, for the next time")
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what it has started ends with it
    sys.exit(main())
