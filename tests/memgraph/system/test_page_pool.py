"""Freed tensors leave their pages to the next ones: faults, bytes, contents; and what happens where there is no pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.sides import Side
from memgraph.system.page_pool import hold, pool_counts, why_not
from tests.support.allocator_meter import compiler
from tests.support.high_water import HighWater
from tests.support.pooled_steps import PooledSteps

ROOT = Path(__file__).parents[3]
BEGIN = """
import os, resource, sys, threading, torch
from memgraph.system.page_pool import *
from memgraph.system import page_pool
class Owner: pass
owner = Owner()
"""

long = pytest.mark.long
needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C compiler")


def child(code: str, **environment: str) -> str:
    """Run a program in a process of its own, and return what it prints."""
    given = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code], cwd=ROOT, env=given, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_compiler
def test_tensors_of_other_sizes_get_the_pages_of_freed_ones_and_no_others() -> None:
    said = child("""
hold(owner, 1 << 30)
def step():
    kept = [torch.ones(300_000 + 1000 * i) for i in range(20)]
    del kept[::2]  # gaps, each too small for what follows
    large = torch.ones(2_900_000)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, pool_counts()
for _ in range(20):
    step()
after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, pool_counts()
print(after[0] - before[0] < 100, after[1].new_pages - before[1].new_pages, after[1].moves > before[1].moves)
print(after[1].held == after[1].most, after[1].in_use)
""")
    assert said == "True 0 True\nTrue 0\n"


@long
@needs_compiler
def test_threads_read_what_they_wrote_and_mappings_stay_few() -> None:
    said = child("""
hold(owner, 24 << 20)
wrong = []
def work(seed):
    draws, held = torch.Generator().manual_seed(seed), []
    for i in range(500):
        size = int(torch.randint(1 << 15, 1 << 19, (), generator=draws))
        held.append((torch.full((size,), float(i)), float(i)))
        if len(held) > 8:
            tensor, value = held.pop(int(torch.randint(len(held), (), generator=draws)))
            wrong.extend([i] * bool((tensor != value).any()))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
counts = pool_counts()
print(wrong, counts.in_use, counts.held <= 24 << 20, counts.most > 24 << 20)
print(len(open("/proc/self/maps").readlines()) < 4000)
""")
    assert said == "[] 0 True True\nTrue\n"


@needs_compiler
def test_blocks_of_all_sizes_and_threads_count_as_live() -> None:
    said = child("""
before = begin_peak()
def work():
    tensors = [torch.ones(count) for count in (1000, 100_000, 1_000_000)]
    empty = torch.ones(0)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
    thread.join()
most = peak() - before
print(0 <= most - 4 * 1_101_000 < 20_000, begin_peak() == before, page_pool._held)
""")
    assert said == "True True {}\n"


@needs_compiler
def test_the_pages_of_an_earlier_plan_go_back_when_another_takes_its_place() -> None:
    said = child("""
hold(owner, 64 << 20)
kept = torch.ones(1 << 20)
torch.ones(1 << 23)
before = pool_counts()
hold(owner, 64 << 20)
print(before.held >= 36 << 20, pool_counts().held == pool_counts().in_use, bool(kept.all()))
""")
    assert said == "True True True\n"


@long
@needs_compiler
def test_pages_go_back_when_their_owner_goes() -> None:
    said = child("""
hold(owner, 64 << 20)
other = Owner()
hold(other, 8 << 20)
kept = torch.ones(1 << 20)
torch.ones(1 << 23)
print(pool_counts().held >> 20)
del owner
print(pool_counts().held >> 20)
del other
print(pool_counts().held >> 20, bool((kept == 1).all()))
del kept
print(pool_counts().held, pool_counts().in_use)
""")
    assert said == "36\n8\n4 True\n0 0\n"


@long
@needs_compiler
def test_a_forked_child_allocates_while_threads_of_its_parent_do() -> None:
    said = child("""
torch.set_num_threads(1)
hold(owner, 64 << 20)
mine, ended = torch.ones(1 << 20), threading.Event()
def work():
    while not ended.is_set():
        torch.empty(1 << 18)
threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads]
from tests.support.forks import forked
def add():
    new = torch.full((1 << 21,), 2.0)
    mine.add_(new[: 1 << 20])
    return bool((mine == 3).all())
for _ in range(20):
    print(forked(add).code(), end=" ")
ended.set()
[thread.join() for thread in threads]
print(bool((mine == 1).all()))
""")
    assert said == "0 " * 20 + "True\n"


@long
@needs_compiler
def test_where_pages_cannot_be_moved_new_ones_are_taken(tmp_path: Path) -> None:
    source, library = tmp_path / "no_moves.c", tmp_path / "no_moves.so"
    source.write_text(
        "#include <errno.h>\n#include <stddef.h>\n"
        "void* mremap(void* a, size_t b, size_t c, int d, ...) { errno = ENOMEM; return (void*)-1; }\n"
    )
    found = compiler()
    assert found is not None
    subprocess.run([found, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    said = child(
        """
hold(owner, 1 << 30)
kept = [torch.full((300_000,), float(i)) for i in range(20)]
del kept[::2]
large = torch.full((2_900_000,), 7.0)
counts = pool_counts()
print(all(bool((tensor == 2 * i + 1).all()) for i, tensor in enumerate(kept)), bool((large == 7).all()))
print(counts.moves, counts.held - counts.in_use)  # what can't be moved goes back
""",
        LD_PRELOAD=str(library),
    )
    assert said == "True True\n0 0\n"


@long
@needs_compiler
def test_storages_are_shared_resized_saved_and_profiled_as_ever() -> None:
    said = child("""
import io
hold(owner, 64 << 20)
tensor = torch.arange(1 << 20, dtype=torch.float32)
tensor.resize_(1 << 21)
print(bool((tensor[: 1 << 20] == torch.arange(1 << 20)).all()), tensor.share_memory_().is_shared())
file = io.BytesIO()
torch.save(tensor, file)
file.seek(0)
print(torch.equal(torch.load(file), tensor))
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
    torch.empty(1 << 20)
print([event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"])
try:
    torch.empty(1 << 50)
except RuntimeError as error:
    print("allocate" in str(error))
""")
    lines = [line for line in said.splitlines() if "USDT" not in line]
    assert lines == ["True True", "True", "[4194304, -4194304]", "True"]


@long
@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"PATH": "", "CC": ""}, "there is no C compiler"),
        ({"THP_MEM_ALLOC_ENABLE": "1"}, "asks torch for huge pages"),
        ({"MEMGRAPH_POOL": "0"}, "MEMGRAPH_POOL=0"),
    ],
)
def test_without_a_pool_the_reason_is_said_and_freed_memory_goes_back(
    environment: dict[str, str], why: str, tmp_path: Path
) -> None:
    said = child(
        """
hold(owner, 1 << 30)
print(why_not())
def anonymous():
    rows = (row.split() for row in open("/proc/self/smaps_rollup"))
    return next(int(row[1]) for row in rows if row[0] == "Anonymous:") << 10
before = anonymous()
blocks = [torch.ones(1 << 18) for _ in range(40)]
del blocks[::2]
print(anonymous() - before < 24 << 20)
""",
        MEMGRAPH_CACHE=str(tmp_path),
        **environment,
    )
    assert why in said.splitlines()[0] and said.splitlines()[1] == "True"


@long
def test_the_allocator_of_an_unknown_torch_is_left_as_it_is() -> None:
    said = child("""
page_pool.TESTED = ("1.0",)
hold(owner, 1 << 30)
print(why_not())
""")
    assert said.startswith(f"the allocator of torch {torch.__version__.partition('+')[0]} is not known")


@long
@needs_compiler
def test_a_library_that_an_earlier_process_has_built_is_loaded_without_a_compiler(tmp_path: Path) -> None:
    code = "hold(owner, 1 << 20)\nprint(repr(why_not()))"
    assert child(code, MEMGRAPH_CACHE=str(tmp_path)) == "''\n"
    assert child(code, MEMGRAPH_CACHE=str(tmp_path), PATH="") == "''\n"


def test_a_limit_may_be_asked_for_again() -> None:
    class Owner:
        pass

    owner = Owner()
    for nbytes in (1 << 20, 0, -1, 1 << 20):
        hold(owner, nbytes)
    assert why_not() or pool_counts().held >= 0


@long
@needs_compiler
def test_a_process_with_a_plan_takes_its_forecast_and_no_new_pages() -> None:
    with Side(PooledSteps, 8) as side:
        water = HighWater(side.process)
        water.reset()
        before = water.anonymous_nbytes
        forecast = side.do("begin", 32768, 0.6)
        faults = []
        for _ in range(4):
            water.reset()
            faults.append(side.do("faults", 1))
            assert water.anonymous_nbytes - before <= 1.02 * forecast
    assert sorted(faults)[1] < 100  # a step of the heap's own small blocks may take some


@long
@needs_compiler
def test_gradients_of_200_steps_are_those_of_eager() -> None:
    with Side(PooledSteps, 4, 2) as side:
        side.do("begin", 2048, 0.6)
        assert side.do("equal", 200)
