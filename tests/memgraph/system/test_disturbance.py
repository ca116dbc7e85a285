"""A measurement knows how much of it was other work, and one that was disturbed is taken once more by the next process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memgraph.system import disturbance, measurement_cache
from memgraph.system.disturbance import LIMIT, Watch, note_disturbed
from memgraph.system.measurement_cache import measure_once, read_cached, write_cached

BURN = "import time; end = time.monotonic() + 20\nprint(flush=True)\nwhile time.monotonic() < end: pass"


@pytest.fixture(autouse=True)
def doubting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubt what is disturbed, as outside of tests."""
    monkeypatch.setattr(disturbance, "LIMIT", LIMIT)


def work(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.fixture
def busy_core() -> Iterator[None]:
    """One core for this thread and for a process that wants it too."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    burning = subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE)
    assert burning.stdout is not None
    try:
        burning.stdout.readline()
        yield
    finally:
        burning.kill()
        burning.communicate()
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("counted", [True, False])
def test_what_another_process_disturbs_is_seen(
    busy_core: None, counted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not counted:
        monkeypatch.setattr(disturbance, "TASKS", tmp_path / "none")
    with Watch() as watch:
        work(0.2)
    assert LIMIT <= watch.disturbed <= 1.0


def test_a_thread_that_waits_for_nothing_or_for_a_file_is_not_disturbed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "schedstat").write_text("5000000 7000000 12\n")
    monkeypatch.setattr(disturbance, "TASKS", tmp_path)
    with Watch() as watch:
        time.sleep(0.01)
    assert watch.disturbed == 0.0


def test_a_clock_that_stands_still_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memgraph.system.disturbance.time.perf_counter", lambda: 1.0)
    with Watch() as watch:
        pass
    assert watch.disturbed == 1.0


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float, float], float]:
    """Measure something in a new process, on a machine that is so busy."""
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))

    def measured(value: float, share: float) -> float:
        def run() -> float:
            counted.append(value)
            return value

        monkeypatch.setattr(Watch, "disturbed", property(lambda watch: share))
        return measure_once({}, "time", run, float, float)

    counted: list[float] = []
    measured.counted = counted  # type: ignore[attr-defined]
    return measured


def test_a_disturbed_measurement_is_taken_again_until_one_is_not(measure: Any) -> None:
    assert measure(21.0, 0.6) == 21.0
    assert measure(30.0, 0.8) == 21.0  # the less disturbed one counts
    assert measure(1.5, 0.0) == 1.5
    assert measure(9.0, 0.0) == 1.5
    assert measure.counted == [21.0, 30.0, 1.5]


def test_a_process_on_a_busy_machine_measures_once(measure: Any) -> None:
    results: dict[str, float] = {}
    for _ in range(3):
        measure_once(results, "other", lambda: measure.counted.append(1.0) or 2.0, float, float)
    assert measure.counted == [1.0]


@pytest.mark.parametrize(
    "strange", [-1.0, math.nan, math.inf, 1e300, "text", [1.0], {}, {"measured": None, "disturbed": 0}]
)
def test_a_value_that_no_measurement_gives_is_a_miss(strange: Any, measure: Any) -> None:
    write_cached("time", strange)
    assert measure(2.0, 0.0) == 2.0
    assert read_cached("time") == 2.0


def test_a_plan_on_disturbed_prices_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disturbance, "_warned", [])
    assert note_disturbed([]) == note_disturbed([0.05]) == 0.0
    assert not caplog.records
    assert [note_disturbed([0.2, 0.47]), note_disturbed([0.3])] == [0.47, 0.3]
    (said,) = caplog.messages
    assert "47% of the ops' time" in said and "a new process measures these ops once more" in said
    assert measurement_cache.Kept(1.0, 0.5).written(float) == {"measured": 1.0, "disturbed": 0.5}
