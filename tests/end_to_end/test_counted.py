"""The promise by the second meter: at every step of every model, all that torch's allocator gives is within the budget.

The first meter is right if it has found what this one counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.support.allocator_meter import Allocator, compiler, preloaded
from tests.support.counted_modules import CountedStep
from tests.support.counted_planning import CountedCall
from tests.support.counted_steps import ALL, OUTPUTS, STEPS, Counted
from tests.support.zoo import BESIDE, CASES

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="the second meter is a library of C that stands before glibc"
)

PLANNING = "tests.support.counted_planning"


def children(folder: Path, *options: str, of: str = "tests.support.counted_steps") -> list[str]:
    """The lines that a counted process prints."""
    command = [sys.executable, "-m", of, *options]
    ended = subprocess.run(command, env=preloaded(folder), capture_output=True, text=True, timeout=550, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()


def assert_within(folder: Path, names: list[str], *options: str) -> list[Counted]:
    rows = [Counted(**json.loads(line)) for line in children(folder, *options, *names)]
    calls = int(options[options.index("--calls") + 1]) if "--calls" in options else 1
    assert len(rows) == STEPS * calls * len(names)
    over = [row for row in rows if not row.counted <= row.forecast <= row.budget]
    assert not over
    missed = [row for row in rows if row.measured is None or row.measured < row.counted]
    assert not missed
    return rows


@pytest.mark.long
def test_every_step_of_every_model_is_within_its_budget(tmp_path: Path) -> None:
    models = (*OUTPUTS, *CASES[len(OUTPUTS) :], *BESIDE)
    assert_within(tmp_path, [f"{case.name}:0.6" for case in models], "--time-limit", "0.5")


@pytest.mark.long
def test_with_an_optimizer_the_update_is_within_it_too(tmp_path: Path) -> None:
    assert_within(tmp_path, ["mobilenet:0.7", "mlp:0.7"], "--time-limit", "0.5", "--optimizer")


@pytest.mark.long
def test_calls_that_add_to_gradients_are_within_it_too(tmp_path: Path) -> None:
    names = ["gpt2:0.15", "llama:0.2", "tied:0.1"]  # at which gradients are on disk
    assert_within(tmp_path, names, "--time-limit", "0.5", "--optimizer", "--calls", "2")


@pytest.mark.long
def test_with_compiled_halves_every_step_is_within_its_budget_too(tmp_path: Path) -> None:
    names = ["queue:0.6", "tied:0.6"]  # of the first, the loss is one of several outputs
    assert all(row.regions for row in assert_within(tmp_path, names, "--time-limit", "0.5", "--regions"))


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.75, 0.5, 0.3])
@pytest.mark.parametrize("options", [("--threads", "2"), ("--optimizer",)])
def test_so_it_is_under_every_budget(tmp_path: Path, share: float, options: tuple[str, ...]) -> None:
    assert_within(tmp_path, [f"{name}:{share}" for name in ALL], "--time-limit", "2", *options)


def assert_modules_within(folder: Path, first: int, last: int) -> None:
    lines = children(folder, str(first), str(last), of="tests.support.counted_modules")
    rows = [CountedStep(**json.loads(line)) for line in lines]
    assert len({row.seed for row in rows}) > (last - first) // 2  # the others are called twice at a time
    assert not [row for row in rows if row.counted > row.budget]
    assert not [row for row in rows if row.counted > row.forecast and not row.beyond]


@pytest.mark.long
def test_every_step_of_random_modules_is_within_its_budget(tmp_path: Path) -> None:
    assert_modules_within(tmp_path, 0, 30)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(30, 2000, 97))
def test_so_it_is_of_all_others(tmp_path: Path, first: int) -> None:
    assert_modules_within(tmp_path, first, min(first + 97, 2000))


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["plain", "adam"])
def test_every_call_that_is_planned_is_within_the_smallest_budget(tmp_path: Path, optimizer: str) -> None:
    rows = [CountedCall(**json.loads(line)) for line in children(tmp_path, optimizer, of=PLANNING)]
    assert not [row for row in rows if row.counted > row.budget or row.warnings]
    assert max(row.counted for row in rows) == rows[0].budget  # the last bytes are needed


@pytest.mark.long
def test_the_second_meter_counts_to_the_byte_in_all_threads(tmp_path: Path) -> None:
    assert children(tmp_path, of="tests.end_to_end.test_counted") == ["1000 3000 0", "512 1536 512"]


def main() -> None:
    """Print the meter's results for a few blocks, in two threads: bytes now, peak, and bytes left."""
    allocator, kept = Allocator(), []

    def report(nbytes: int, keep: bool) -> None:
        before = allocator.now
        allocator.reset()
        first = torch.empty(nbytes, dtype=torch.uint8)
        now = allocator.now - before
        other = torch.empty(2 * nbytes, dtype=torch.uint8)
        most = allocator.most - before
        kept.append(first if keep else None)
        del first, other
        print(now, most, allocator.now - before)

    report(1000, False)
    thread = threading.Thread(target=report, args=(512, True))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
