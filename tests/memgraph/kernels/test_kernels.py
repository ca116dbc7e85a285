"""The kernels are right under the interpreter, compile for a GPU, and leave a CPU alone."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from memgraph.kernels import adamw, autotune, cast, copy_runs, scaled
from memgraph.kernels.autotune import WAYS, Way, measured, way_of

ROOT = Path(__file__).parents[3]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_every_kernel_is_its_twin_under_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "tests/kernels"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout


def test_importing_memgraph_brings_in_no_kernel() -> None:
    code = "import memgraph, sys; print([name for name in sys.modules if name.startswith('memgraph.kernels')])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr


# --- as a GPU would run them


def compiled(kernel: Any, signature: dict[str, str], warps: int = 4, **constants: Any) -> str:
    """The PTX of a kernel for an H100 or H200; its addresses begin at multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = dict.fromkeys(kernel.arg_names, "constexpr") | signature
    even = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind[0] == "*" or kind == "i32"}
    source = ASTSource(kernel, signature=kinds, constexprs=constants, attrs=even)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.asm["cubin"]
    ptx: str = found.asm["ptx"]
    return ptx


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune, "_known", {})


def test_a_cast_reads_and_writes_vectors() -> None:
    ptx = compiled(
        cast._kernel, {"of": "*u32", "into": "*u16", "count": "i32", "seed": "i32"},
        FROM="f32", INTO="bf16", STOCHASTIC=False, BLOCK=1024,
    )  # fmt: skip
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_move_reads_and_writes_vectors(stochastic: bool) -> None:
    tl = __import__("triton.language", fromlist=["language"])
    ptx = compiled(
        copy_runs._kernel, {"table": "*i64", "rows": "i32", "seed": "i32"},
        FROM="f32", INTO="bf16", OF=tl.uint32, TO=tl.uint16, STOCHASTIC=stochastic, ALIGNED=True, BLOCK=1024,
    )  # fmt: skip
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


FORMATS = ("f32", "bf16", "f16", "e4m3")
KINDS = {"f32": "u32", "bf16": "u16", "f16": "u16", "e4m3": "u8"}  # of the codes
CHANCE = [False, True]
TABLE = {"table": "*i64", "rows": "i32", "seed": "i32"}
NUMBERS = ("sign", "decay", "to_new", "to_old", "keep", "add", "correction", "eps", "size")


def integers(kind: str) -> Any:
    return getattr(__import__("triton.language", fromlist=["language"]), f"uint{kind[1:]}")


def test_what_is_not_cast_or_not_aligned_compiles_too() -> None:
    for name, kind in (("", "u64"), ("f16", "u16")):
        compiled(
            copy_runs._kernel, TABLE, FROM=name, INTO=name and "e4m3", OF=integers(kind),
            TO=integers("u8" if name else kind), STOCHASTIC=False, ALIGNED=False, BLOCK=8192,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stochastic", CHANCE)
@pytest.mark.parametrize("of", FORMATS)
def test_every_cast_compiles(of: str, stochastic: bool) -> None:
    for into in FORMATS:
        if into != of:
            compiled(
                cast._kernel, {"of": f"*{KINDS[of]}", "into": f"*{KINDS[into]}", "count": "i32", "seed": "i32"},
                FROM=of, INTO=into, STOCHASTIC=stochastic, BLOCK=1024,
            )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stochastic", CHANCE)
@pytest.mark.parametrize("of", FORMATS)
def test_every_move_that_casts_compiles(of: str, stochastic: bool) -> None:
    for into in FORMATS:
        if into != of:
            compiled(
                copy_runs._kernel, TABLE, FROM=of, INTO=into, OF=integers(KINDS[of]), TO=integers(KINDS[into]),
                STOCHASTIC=stochastic, ALIGNED=False, BLOCK=1024,
            )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("aligned", [False, True])
def test_every_move_that_does_not_cast_compiles(aligned: bool) -> None:
    for kind in ("u8", "u16", "u32", "u64"):
        raw = integers(kind)
        compiled(
            copy_runs._kernel, TABLE, FROM="", INTO="", OF=raw, TO=raw, STOCHASTIC=False, ALIGNED=aligned, BLOCK=8192
        )


@pytest.mark.parametrize("of", FORMATS[:3])
def test_every_scaling_compiles(of: str) -> None:
    for narrow, stochastic in ((True, True), (False, False)):
        compiled(
            scaled._kernel, TABLE, FORMAT=of, OF=integers(KINDS[of]), NARROW=narrow, STOCHASTIC=stochastic,
            GROUP=128, BLOCK=1024,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stochastic", CHANCE)
@pytest.mark.parametrize("parameter", FORMATS[:2])
def test_every_update_compiles(parameter: str, stochastic: bool) -> None:
    for gradient, states in product(FORMATS[:2], FORMATS[:2]):
        formats = {"parameter": parameter, "gradient": gradient, "exp_avg": states, "exp_avg_sq": states}
        held = {name: f"*{KINDS[format]}" for name, format in formats.items()}
        compiled(
            adamw._kernel, {**held, "count": "i64", **dict.fromkeys(NUMBERS, "fp32"), "seed": "i32"},
            PARAMETER=parameter, GRADIENT=gradient, FIRST=states, SECOND=states, STOCHASTIC=stochastic, BLOCK=1024,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_compiles(way: Way) -> None:
    compiled(
        copy_runs._kernel, TABLE, FROM="f32", INTO="bf16", OF=integers("u32"), TO=integers("u16"),
        STOCHASTIC=False, ALIGNED=True, BLOCK=way.block, warps=way.warps,
    )  # fmt: skip


def test_an_update_fuses_no_product_with_a_sum() -> None:
    held = {"parameter": "*u16", "gradient": "*u16", "exp_avg": "*u32", "exp_avg_sq": "*u32"}
    ptx = compiled(
        adamw._kernel, {**held, "count": "i32", **dict.fromkeys(NUMBERS, "fp32"), "seed": "i32"},
        PARAMETER="bf16", GRADIENT="bf16", FIRST="f32", SECOND="f32", STOCHASTIC=True, BLOCK=1024,
    )  # fmt: skip
    assert "ld.global.v4.b32" in ptx and "sqrt.rn.f32" in ptx and "div.rn.f32" in ptx
    assert "fma" not in ptx and ".ftz" not in ptx and "approx" not in ptx


# --- which way they run


def test_on_a_cpu_the_twin_runs_and_nothing_is_measured() -> None:
    assert measured("cast", CPU, pytest.fail) == {}  # type: ignore[arg-type]
    assert way_of("cast", CPU, 1 << 20) is None


def test_what_was_not_measured_runs_as_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "environment_key", str)
    assert way_of("cast", GPU, 1 << 20) is None


def test_the_fastest_way_is_found_once_for_each_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "environment_key", str)
    now: list[tuple[int, Way | None]] = []
    runs = 0

    def trial(nbytes: int, way: Way | None) -> Any:
        def run() -> None:
            nonlocal runs
            runs += 1
            now[:] = [(nbytes, way)]

        return run

    def us(run: Any, device: torch.device) -> float:
        ((nbytes, way),) = now
        return 10.0 if way is None else 20.0 - WAYS.index(way) * 8 if nbytes > 1 << 20 else 30.0

    monkeypatch.setattr(autotune, "shortest_us", us)
    found = measured("cast", GPU, trial)
    assert list(found.values()) == [None, None, WAYS[-1], WAYS[-1]]
    assert runs == 4 * (1 + len(WAYS))
    assert [way_of("cast", GPU, nbytes) for nbytes in (5, 2 << 20, 17 << 20, 1 << 40)] == [
        None,
        None,
        WAYS[-1],
        WAYS[-1],
    ]
    monkeypatch.setattr(autotune, "_known", {})
    assert way_of("cast", GPU, 17 << 20) is None
    assert measured("cast", GPU, pytest.fail) == found  # type: ignore[arg-type]
    assert way_of("cast", GPU, 17 << 20) == WAYS[-1]


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured for "cuda" is looked up for tensors, which know the number."""
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(autotune, "environment_key", lambda device: "a GPU")
    monkeypatch.setattr(autotune, "_known", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(autotune, "shortest_us", lambda run, device: 1.0 if run() else 2.0)
    measured("cast", torch.device("cuda"), lambda nbytes, way: lambda: way == WAYS[2])
    assert way_of("cast", GPU, 1 << 20) == WAYS[2]
    assert way_of("cast", torch.device("cuda", 1), 1 << 20) is None


def test_a_way_says_how_many_programs_there_are() -> None:
    assert (Way(1024).grid(7), Way(1024, programs=32).grid(7), Way(1024, programs=32).grid(700)) == (7, 7, 32)
