"""Core tests on each torch that memgraph is said to work with, or a smoke of them on the newest there is.

    python -m benchmarks.versions [2.11 2.15 ...]      an environment for each in .venv-versions, and a row:

    torch   triton  passed  failed  xfailed  seconds
    2.11.0  3.6.0      412       0        3      210

    python -m benchmarks.versions newest --smoke --within 720    what CI asks of the newest torch that pip finds

A CUDA build of torch takes 6 GB, so each environment goes once its row is there, unless `--keep` is given.  With
`--smoke`, a torch that can't be installed in time is reported and is no failure, because CI must not wait for a
registry. This file imports only the standard library, because there is no environment yet.
"""

from __future__ import annotations

import argparse
import os
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
NEWEST = "newest"
WANTED = ("numpy", "highspy", "safetensors", "rich", "typer", "networkx", "psutil", "transformers", "expecttest")
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
UNBOUND = ("torch", "triton", "setuptools")  # each torch has its own, whatever constraints.txt says
ROOM = 8 << 30  # bytes of disk that an environment takes at most, while it is unpacked
INSTALLED = 0.6  # of the time that `--within` gives: what the tests need at least is left
CORE = (
    "tests/test_torch_names.py",
    "tests/end_to_end/test_promise.py",
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
SMOKE = (
    "tests/memgraph/system/test_private_names.py",
    "tests/end_to_end/test_promise.py",
    "-k",
    "private_names or (is_equal and 0.5)",
)


class NotInstalledError(Exception):
    """An environment could not be made, for the reason in the message."""


@dataclass(frozen=True)
class Row:
    """The results of the tests on one torch."""

    torch: str
    triton: str
    passed: int
    failed: int
    xfailed: int
    seconds: float

    def __str__(self) -> str:
        counts = f"{self.passed:>6}  {self.failed:>6}  {self.xfailed:>7}  {self.seconds:>7.0f}"
        return f"{self.torch:<7} {self.triton:<7} {counts}"


HEADER = f"{'torch':<7} {'triton':<7} {'passed':>6}  {'failed':>6}  {'xfailed':>7}  {'seconds':>7}"


def main() -> int:
    """Print a row for each version; 1 if a test has failed, or a version that was asked for is not there."""
    given = _arguments()
    until = time.monotonic() + given.within
    print(HEADER, flush=True)
    failed = False
    for version in given.versions or VERSIONS:
        try:
            python = installed(version, time.monotonic() + INSTALLED * (until - time.monotonic()))
            row = tested(python, SMOKE if given.smoke else CORE, until)
            print(row, flush=True)  # at once: removing an environment takes a while
            failed |= row.failed > 0 or row.passed == 0
        except NotInstalledError as error:
            print(f"\n*** torch {version} WAS NOT TESTED: {error} ***\n", flush=True)
            failed |= not given.smoke
        finally:
            if not given.keep:
                shutil.rmtree(FOLDER / version, ignore_errors=True)
    return int(failed)


def installed(version: str, until: float) -> Path:
    """Make an environment with this torch and the tests' packages; return its Python.

    Raises:
        NotInstalledError: the disk is too full, pip fails, or it takes longer than `until`.
    """
    place = FOLDER / version
    python = place / "bin" / "python"
    if (place / "ready").exists():
        return python
    free = shutil.disk_usage(ROOT).free
    if free < ROOM:
        raise NotInstalledError(f"it takes up to {ROOM >> 30} GB of disk, and {free >> 30} are free")
    _run([sys.executable, "-m", "venv", "--clear", str(place)], until)
    (place / "constraints.txt").write_text(_constraints())
    pip = [str(python), "-m", "pip", "install", "--no-cache-dir", "--quiet"]
    _run([*pip, "-c", str(place / "constraints.txt"), *WANTED, *TOOLS], until)
    _run([*pip, "--upgrade", "torch" if version == NEWEST else f"torch=={version}.*"], until)
    _run([*pip, "triton>=3.6"], until)  # as pyproject.toml asks: a CPU build of torch brings none
    _run([str(python), "-c", "import torch"], until)
    (place / "ready").touch()
    return python


def tested(python: Path, tests: Sequence[str], until: float) -> Row:
    """Run the tests in an environment, and return a row.

    Raises:
        NotInstalledError: they have not ended by then.
    """
    begin = time.monotonic()
    with TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        options = ["-p", "no:cacheprovider", f"--junitxml={found}", "-o", "addopts=--import-mode=importlib"]
        wanted = ["-q", "--no-header", "-rf", "--tb=line", "-m", "not slow and not gpu"]
        with suppress(subprocess.CalledProcessError):  # failed tests are in the file
            _run([str(python), "-m", "pytest", *options, *wanted, *tests], until, shown=True)
        cases = ElementTree.parse(found).getroot().iter("testcase") if found.exists() else ()
        kinds = [_outcome(case) for case in cases]
    versions = [_version(python, name) for name in ("torch", "triton")]
    passed, failed, xfailed = (kinds.count(kind) for kind in ("passed", "failed", "xfailed"))
    return Row(versions[0], versions[1], passed, failed, xfailed, time.monotonic() - begin)


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def _version(python: Path, name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}).partition('+')[0])"
    said = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return said.stdout.strip() or "-"


def _constraints() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if line.partition("==")[0] not in UNBOUND)


def _run(command: Sequence[str], until: float, shown: bool = False) -> None:
    """Run a command, and end it with all that it has started when its time is over.

    Raises:
        NotInstalledError: it has no time left, or has failed and was not to be `shown`.
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
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise NotInstalledError(f"{' '.join(command[1:5])} ... has not ended in its time") from None
            raise
    if process.returncode and shown:
        raise subprocess.CalledProcessError(process.returncode, list(command))
    if process.returncode:
        raise NotInstalledError(f"{' '.join(command[1:5])} ... has failed: {_reason(said)}")


def _reason(said: str) -> str:
    """Return the errors in a command's output, and pip's first warning that a registry does not answer."""
    lines = said.splitlines()
    unanswered = [line.strip() for line in lines if "connection broken" in line][:1]
    errors = " | ".join(line for line in lines if "ERROR" in line)[-500:] or said[-500:].strip()
    return " | ".join([*unanswered, errors])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("versions", nargs="*", help=f"of torch, or {NEWEST!r}; by default {', '.join(VERSIONS)}")
    parser.add_argument("--smoke", action="store_true", help="of the zoo; what is not installed is no failure")
    parser.add_argument("--within", type=float, default=4 * 3600.0, metavar="SECONDS", help="for all that is done")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are, for the next time")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
