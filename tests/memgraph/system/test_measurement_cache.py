"""Measurements are kept exactly for later processes; an unusable cache is ignored with a warning."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, fx, nn

import memgraph
from memgraph.capture.capture import capture
from memgraph.profile import link_bandwidth, machine_profile, op_profiler, roofline
from memgraph.profile.link_bandwidth import SIZES, Link, measure_files
from memgraph.profile.machine_profile import measure_links
from memgraph.profile.op_cost import op_key
from memgraph.profile.op_profiler import OpProfiler
from memgraph.system import measurement_cache
from memgraph.system.measurement_cache import CostDatabase, cache_folder, read_cached, write_cached
from passes import Machine

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for this test."""
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path / "cache"))
    for remembering in (op_profiler, roofline, link_bandwidth, machine_profile):
        monkeypatch.setattr(remembering, "_known", {})
    monkeypatch.setattr(measurement_cache, "_open", {})
    return tmp_path / "cache"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear what this process has cached, as if in another process."""
    for remembering in (op_profiler, roofline, link_bandwidth, machine_profile):
        monkeypatch.setattr(remembering, "_known", {})


class Net(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).sort(-1)[0].square().mean()


def nodes(x: Tensor, y: Tensor) -> dict[str, fx.Node]:
    graph = capture(Net(), (x, y), {}).graph.graph
    return {node.name: node for node in graph.nodes if node.op == "call_function"}


def square(size: int = 64, dtype: torch.dtype = torch.float32) -> dict[str, fx.Node]:
    return nodes(*(torch.ones(size, size, dtype=dtype, requires_grad=True) for _ in range(2)))


def rows(folder: Path) -> dict[str, str]:
    with sqlite3.connect(folder / "costs.sqlite") as file:
        return dict(file.execute("SELECT key, value FROM costs"))


# --- what is kept


def test_what_is_kept_is_found_again_exactly(folder: Path) -> None:
    value = {"us": 0.1 + 0.2, "workspace": 2**60 + 1, "made": [["float32", [2, 3], [3, 1]]]}
    write_cached("a", value)
    assert read_cached("a") == value
    assert read_cached("b") is None
    write_cached("a", [1])
    assert read_cached("a") == [1]


def test_an_op_that_was_measured_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sort = square()["sort"]
    found = OpProfiler(1 << 30)._op_cost(sort)
    assert found.cost.workspace > 0
    forget(monkeypatch)
    monkeypatch.setattr(op_profiler, "_measure", lambda *given: pytest.fail("it was run"))
    assert OpProfiler(1 << 30)._op_cost(sort) == found
    assert OpProfiler(0)._op_cost(sort) == found  # though it would not fit now


STEP = """
import torch, memgraph
from torch import nn
from memgraph.profile import op_profiler as probe
run = probe._measure
probe._measure = lambda node, before: print("runs", node.target) or run(node, before)
module = nn.Sequential(nn.Linear(32, 32), nn.Softmax(-1), nn.Linear(32, 32))
report = memgraph.plan(module, torch.ones(8, 32), budget=1 << 30, loss=lambda out: out.square().mean())
print([(op.us, op.workspace) for op in report.forecast.trace.ops])
"""


def process(folder: Path, **environment: str) -> subprocess.Popen[str]:
    there = {**os.environ, "MEMGRAPH_CACHE": str(folder), "PYTHONPATH": str(ROOT), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", STEP], stdout=pipe, stderr=pipe, text=True, env=there)


@pytest.mark.long
def test_a_second_process_runs_no_op_and_forecasts_the_same(folder: Path) -> None:
    first, second = (process(folder).communicate() for _ in range(2))
    assert "runs" in first[0], first[1]
    assert "runs" not in second[0], second[1]
    assert second[0] == first[0].splitlines()[-1] + "\n"
    threads = str(torch.get_num_threads() + 1)
    assert "runs" in process(folder, OMP_NUM_THREADS=threads).communicate()[0]


@pytest.mark.long
def test_two_processes_at_once_share_a_cache(folder: Path) -> None:
    both = [process(folder) for _ in range(2)]
    said = [one.communicate() for one in both]
    assert any("runs" in out for out, _ in said)
    assert not any("Warning" in err or "Error" in err for _, err in said)
    assert "runs" not in process(folder).communicate()[0]


@pytest.mark.slow  # three processes import torch
def test_many_processes_begin_and_fill_a_cache_at_once(folder: Path) -> None:
    code = "import sys; from memgraph.system.measurement_cache import write_cached\nfor i in range(50): write_cached(f'{sys.argv[1]} {i}', i)"
    there = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-W", "error", "-c", code]
    folder.mkdir()
    (folder / "costs.sqlite").write_bytes(b"")
    all_of_them = [subprocess.Popen([*run, str(i)], env=there) for i in range(3)]
    assert [one.wait() for one in all_of_them] == [0, 0, 0]
    assert all(read_cached(f"{process} {i}") == i for process in range(3) for i in range(50))


def test_an_empty_name_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    assert cache_folder() is None
    write_cached("a", 1)
    assert read_cached("a") is None
    monkeypatch.delenv("MEMGRAPH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "memgraph"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "memgraph"


# --- keys


def test_the_key_tells_shapes_dtypes_strides_threads_and_modes_apart() -> None:
    plain = square()["mm"]
    keys = {op_key(node) for node in (plain, square(32)["mm"], square(64, torch.float64)["mm"])}
    transposed = nodes(torch.ones(64, 64, requires_grad=True).t(), torch.ones(64, 64, requires_grad=True))["mm"]
    keys.add(op_key(transposed))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        keys.add(op_key(plain))
    finally:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    keys.add(op_key(plain))
    torch.use_deterministic_algorithms(False)
    assert len(keys) == 6
    assert op_key(square()["mm"]) == op_key(plain)


def test_what_is_kept_says_on_which_device_and_with_which_torch(folder: Path) -> None:
    OpProfiler(1 << 30)(square()["mm"])
    (key,) = rows(folder)
    assert torch.__version__ in key
    assert torch.backends.cpu.get_cpu_capability() in key


def test_autocast_around_planning_does_not_change_what_ops_cost() -> None:
    mm = square()["mm"]
    with torch.autocast("cpu", torch.bfloat16):
        made = OpProfiler(1 << 30).layouts(mm)
    assert made is not None
    assert made[0].layout[0] is torch.float32


# --- caches that are of no use


def test_a_corrupted_cache_is_renamed_and_replaced(folder: Path) -> None:
    folder.mkdir()
    path = folder / "costs.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.warns(RuntimeWarning, match=r"\.unreadable, and ops are measured again") as said:
        write_cached("a", 1)
        write_cached("b", 2)
    assert len(said) == 1
    assert (read_cached("a"), read_cached("b")) == (1, 2)
    assert (folder / "costs.sqlite.unreadable").read_bytes().startswith(b"no database")


def test_a_cache_with_a_damaged_middle_is_replaced(folder: Path) -> None:
    for i in range(300):
        write_cached(f"{i} {'x' * 200}", i)
    path = folder / "costs.sqlite"
    data = path.read_bytes()
    path.write_bytes(data[:4096] + os.urandom(len(data) - 4096))
    with pytest.warns(RuntimeWarning, match="measured again") as said:
        assert read_cached(f"7 {'x' * 200}") is None
    assert len(said) == 1
    write_cached("a", 1)
    assert read_cached("a") == 1


def test_a_value_that_was_changed_is_not_believed(folder: Path) -> None:
    write_cached("a", {"workspace": 4096})
    with sqlite3.connect(folder / "costs.sqlite") as file:
        file.execute("UPDATE costs SET value = ?", (json.dumps({"workspace": 0}),))
    with pytest.warns(RuntimeWarning, match="has damaged costs"):
        assert read_cached("a") is None


@pytest.mark.parametrize(
    "statements",
    [
        ("CREATE TABLE songs (title TEXT)",),
        ("CREATE TABLE costs (key TEXT, price REAL)",),
        (
            "CREATE TABLE costs (name TEXT)",
            f"PRAGMA application_id = {measurement_cache.MARK}",
            "PRAGMA user_version = 1",
        ),
        (measurement_cache.TABLE, f"PRAGMA application_id = {measurement_cache.MARK}", "PRAGMA user_version = 99"),
    ],
)
def test_a_foreign_file_is_renamed_unchanged(folder: Path, statements: tuple[str, ...]) -> None:
    folder.mkdir()
    with sqlite3.connect(folder / "costs.sqlite") as file:
        for statement in statements:
            file.execute(statement)
    before = (folder / "costs.sqlite").read_bytes()
    with pytest.warns(RuntimeWarning, match="can't be read") as said:
        assert read_cached("a") is None
        write_cached("a", 1)
    assert len(said) == 1
    assert read_cached("a") == 1
    assert (folder / "costs.sqlite.unreadable").read_bytes() == before


def test_a_folder_that_can_not_be_made_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match="can't be used .*MEMGRAPH_CACHE") as said:
        write_cached("a", 1)
        write_cached("b", 1)
    assert len(said) == 1
    assert read_cached("a") is None
    assert memgraph.plan(nn.Linear(4, 4), torch.ones(2, 4), budget=1 << 30).plan == ()


@pytest.fixture
def unprivileged_user() -> Iterator[int]:
    """Return a user other than root, so that a folder's mode has an effect."""
    yield 65534 if os.geteuid() == 0 else os.geteuid()
    if os.getuid() == 0:
        os.seteuid(0)


def test_a_cache_that_can_not_be_written_is_still_read(unprivileged_user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("MEMGRAPH_CACHE", name)
        write_cached("a", 1)
        Path(name, "costs.sqlite").chmod(0o444)
        Path(name).chmod(0o555)
        os.seteuid(unprivileged_user)
        with pytest.warns(RuntimeWarning, match="can't be used") as said:
            write_cached("b", 1)
        assert len(said) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (read_cached("a"), read_cached("b")) == (1, None)
            write_cached("c", 1)
        if os.getuid() == 0:
            os.seteuid(0)
        Path(name).chmod(0o755)


def test_a_cache_that_another_process_holds_is_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cached("a", 1)
    monkeypatch.setattr(measurement_cache, "WAIT", 0.1)
    with sqlite3.connect(folder / "costs.sqlite", isolation_level=None) as file:
        file.execute("BEGIN EXCLUSIVE")
        with pytest.warns(RuntimeWarning, match="locked"):
            write_cached("b", 1)
        file.execute("ROLLBACK")
    assert CostDatabase(folder / "costs.sqlite").get("a") == 1


# --- ops that are not run


def test_an_op_that_would_not_fit_is_priced_by_its_flops_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_profiler, "_measure", lambda *given: pytest.fail("it was run"))
    monkeypatch.setattr(roofline, "measured_rates", lambda device, dtype: roofline.Rates(flops=1000.0, nbytes=10.0))
    large, small = square(1024)["mm"], square(8)["mm"]
    assert roofline.flops(large) == 2 * 1024**3
    assert roofline.roofline(large, 3 * 4 * 1024**2, 1 << 30) == round(2 * 1024**3 / 1000.0, 1)
    assert OpProfiler(0)(small).us == round(max(2 * 8**3 / 20_000, 3 * 4 * 8**2 / 5000), 1)
    assert roofline.flops(square()["sort"]) == 0.0


def test_the_rates_of_a_device_are_measured_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mm = square(8)["mm"]
    us = roofline.roofline(mm, 1 << 30, 1 << 30)
    assert us > 0
    assert [key.split()[0] for key in rows(folder)] == ["rates"]
    forget(monkeypatch)
    monkeypatch.setattr(roofline, "_measure", lambda *args: pytest.fail("measured again"))
    assert roofline.roofline(mm, 1 << 30, 1 << 30) == us
    assert roofline.roofline(mm, 1 << 30, 1 << 10) == round((1 << 30) / roofline.Rates().nbytes, 1)


# --- links


def test_links_are_measured_by_size_once_for_a_file_system_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_bandwidth, "SIZES", {4096: 4, 65536: 2})
    random = torch.get_rng_state()
    found = measure_files(tmp_path)
    assert all(us > 0 for link in found for _, us in link.points)
    assert torch.equal(torch.get_rng_state(), random)
    forget(monkeypatch)
    monkeypatch.setattr(link_bandwidth, "_measure_files", lambda *given: pytest.fail("measured again"))
    (tmp_path / "below").mkdir()
    assert measure_files(tmp_path / "below") == found


def test_large_copies_are_not_timed_on_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_bandwidth, "_copied", lambda tier: (2e5, 2e5))
    assert [nbytes for nbytes, _ in measure_files(tmp_path)[0].points] == list(SIZES)[:1]


@pytest.mark.long
@pytest.mark.parametrize("available", [20 << 20, 1 << 20, 1 << 14])
def test_a_disk_that_is_nearly_full_takes_what_a_step_sends_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    plain = os.statvfs(tmp_path)
    full = SimpleNamespace(f_bavail=available // 512, f_frsize=512, f_blocks=plain.f_blocks)
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    forget(monkeypatch)
    out, back = measure_files(tmp_path)
    assert out.us(1 << 20) > 0 and back.us(1 << 20) > 0
    assert machine_profile.measure_copy_overhead(tmp_path, (out, back)).us_per_byte >= 0
    monkeypatch.undo()
    forget(monkeypatch)
    assert len(measure_files(tmp_path)[0].points) > 1  # measured as ever, once there is room


@pytest.mark.long
def test_one_rate_stands_for_all_sizes_that_may_be_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(((1000, 20.0), (2000, 30.0), (10_000, 110.0)))
    assert [link.us(nbytes) for nbytes in (500, 1000, 1500, 2000, 6000, 20_000)] == [10, 20, 25, 30, 70, 220]
    assert link.rate([1000] * 9) == 50.0
    sizes = [500, 1500, 6000]
    assert sum(sizes) / link.rate(sizes) == sum(map(link.us, sizes))
    monkeypatch.setattr("memgraph.profile.machine_profile.measure_files", lambda folder, room: (link, link))
    assert measure_links(Machine(1), "disk", torch.device("cpu"), tmp_path, [1000]).link.out == 50.0
    assert measure_links(Machine(1), "disk", torch.device("cpu"), tmp_path).link.out == link.rate([4 << 20])
