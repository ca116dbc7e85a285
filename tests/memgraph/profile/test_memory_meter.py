"""A measured peak is exact to the byte, and never lower than what the work allocated."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.autograd.profiler import profile

from memgraph.profile.memory_meter import Allocation, CpuMeter, CudaMeter, _account, measure_peak, resident_bytes

ROOT = Path(__file__).parents[3]
MIB = 2**20


def block(mib: int = 1) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_two_blocks_of_which_one_is_freed() -> None:
    def work() -> torch.Tensor:
        first, second = block(), block()
        del first
        return second

    result, allocation = measure_peak(work)
    assert result.shape == (MIB,)
    assert allocation == Allocation(peak=2 * MIB, net=MIB)


def test_one_block_after_the_other_peaks_at_one() -> None:
    def work() -> None:
        block()
        block()

    assert measure_peak(work)[1] == Allocation(peak=MIB, net=0)


def test_nothing() -> None:
    assert measure_peak(lambda: 7) == (7, Allocation(0, 0))


def test_a_temporary_inside_an_op_counts() -> None:
    x = torch.zeros(8, 16, 32, 32)
    convolution = torch.nn.Conv2d(16, 16, 3, padding=1).requires_grad_(False)
    y, allocation = measure_peak(lambda: convolution(x))
    assert allocation is not None
    assert allocation.net == resident_bytes([y])
    assert allocation.peak >= allocation.net


def test_forward_and_backward_to_the_byte() -> None:
    weight = torch.ones(256, 256, requires_grad=True)
    x = torch.ones(64, 256)

    def work() -> None:
        ((x @ weight) * 2).sum().backward()

    _, allocation = measure_peak(work)
    assert allocation is not None
    assert allocation.net == weight.nbytes
    product, gradient = 64 * 256 * 4, weight.nbytes
    assert product + gradient <= allocation.peak <= 3 * product + gradient


def test_freeing_what_was_there_before_never_lowers_the_figure() -> None:
    held = [block()]

    def work() -> torch.Tensor:
        held.clear()
        return block()

    assert measure_peak(work)[1] == Allocation(peak=MIB, net=MIB)
    kept = [measure_peak(block)[0]]
    assert measure_peak(kept.clear)[1] == Allocation(0, 0)


def test_a_size_remembered_for_an_address_is_not_believed() -> None:
    stale, fresh, own = (1, -64), (2, 10), (2, -10)
    assert _account([stale, fresh, own]) == Allocation(peak=10, net=0)


def test_a_block_of_one_window_may_go_in_the_next() -> None:
    meter = CpuMeter()
    with meter.window():
        kept = torch.empty(1000, dtype=torch.uint8)
    between = torch.empty(5000, dtype=torch.uint8)
    with meter.window(given=8):
        del kept
        other = torch.empty(600, dtype=torch.uint8)
    assert meter.allocated() == Allocation(peak=1008, net=600)
    del between, other


def test_outputs_that_the_caller_has_freed_are_no_peak_at_the_end() -> None:
    meter = CpuMeter()
    with meter.window():
        output = torch.empty(1000, dtype=torch.uint8)
    del output
    with meter.window(given=1000 - 1000):  # its tangent, without the output
        meter.freed(1000)
        other = torch.empty(300, dtype=torch.uint8)
    assert meter.allocated() == Allocation(peak=1000, net=1300)
    del other


def test_threads_of_others_are_not_counted() -> None:
    def work() -> None:
        thread = threading.Thread(target=block)
        thread.start()
        thread.join()

    assert measure_peak(work)[1] == Allocation(0, 0)


def test_an_exception_passes_and_the_profiler_is_stopped() -> None:
    def work() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure_peak(work)
    assert measure_peak(block)[1] == Allocation(MIB, MIB)


def test_a_running_profiler_is_left_alone() -> None:
    with (outer := profile(use_kineto=True)):
        result, allocation = measure_peak(block)
    assert allocation is None
    assert result.shape == (MIB,)
    assert any(event.name == "aten::empty" for event in outer.function_events or ())


def test_measuring_inside_a_measurement() -> None:
    (_, inner), outer = measure_peak(lambda: measure_peak(block))
    assert inner is None
    assert outer == Allocation(MIB, MIB)


def test_work_that_profiles_itself_is_not_measured() -> None:
    def work() -> int:
        with profile(use_kineto=True):
            block()
        return 7

    assert measure_peak(work) == (7, None)
    assert measure_peak(block)[1] == Allocation(MIB, MIB)


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        measure_peak(block, device="meta")


def test_resident_bytes_counts_a_storage_once() -> None:
    x, y = block(), block(2)
    assert resident_bytes([x, x.view(2, -1), x[5:9], y]) == 3 * MIB
    assert resident_bytes([]) == 0
    assert resident_bytes(block() for _ in range(3)) == 3 * MIB


@pytest.mark.long
def test_it_is_silent_and_leaves_the_environment_alone() -> None:
    code = "import os; from memgraph.profile.memory_meter import measure_peak; measure_peak(lambda: 7); print('KINETO_LOG_LEVEL' in os.environ)"
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("False\n", "", 0)


def lines_of_a_profiler(when: str) -> list[str]:
    """Return the lines that torch's profiler prints for a caller's run ("c"), and for measurements ("m"), in order."""
    script = """
import sys, torch
from memgraph.profile.memory_meter import measure_peak
for each in sys.argv[1]:
    if each == "m":
        assert measure_peak(lambda: torch.zeros(3))[1] is not None
        continue
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.zeros(3)
"""
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    run = subprocess.run(
        [sys.executable, "-c", script, when], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return [line.rpartition("] ")[2] for line in run.stderr.splitlines() if line.startswith("USDT")]


@pytest.mark.long
def test_a_measurement_adds_no_line_to_those_of_the_callers_profiler_and_takes_none() -> None:
    assert lines_of_a_profiler("mcmc") == 2 * lines_of_a_profiler("c")


def test_on_a_gpu_the_allocators_counters_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 1000, 1000

    def take(nbytes: int) -> None:
        nonlocal now, most
        now, most = now + nbytes, max(most, now + nbytes)

    def reset(_: object) -> None:
        nonlocal most
        most = now

    def stats(_: object) -> dict[str, int]:
        """Blocks are larger than the requested bytes, and segments are larger than blocks."""
        kinds = {"requested_bytes": 1, "allocated_bytes": 2, "reserved_bytes": 3}
        return {f"{kind}.all.{when}": times * nbytes for kind, times in kinds.items()
                for when, nbytes in (("current", now), ("peak", most))}  # fmt: skip

    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    meter = CudaMeter(torch.device("cuda"))
    with meter.window():
        take(500)
        take(-200)
    take(64)  # between two windows: not the work's, but for what is given
    with meter.window(given=64):
        take(400)
        take(-700)
    assert meter.allocated() == Allocation(peak=300 + 64 + 400, net=0, blocks=2 * 1764, held=3 * 1764)


@pytest.mark.long
def test_a_block_that_came_before_its_measurement_goes_without_a_word_and_later_words_are_heard() -> None:
    script = """
import torch
from memgraph.profile.memory_meter import _level, measure_peak
level = _level("libc10.so", "FLAGS_caffe2_log_level")
before, held = level.value, [torch.ones(1000)]
measure_peak(held.clear)
print(level.value == before)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout == "True\n"
    assert "unknown size" not in run.stderr
