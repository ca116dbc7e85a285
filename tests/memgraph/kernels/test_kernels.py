"""The kernels are right under the interpreter, compile for a GPU, and leave a CPU alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memgraph.kernels import cast
from memgraph.kernels.cast import CONFIGS, LaunchConfig, best_config, tune

ROOT = Path(__file__).parents[3]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.long
def test_every_kernel_equals_its_fallback_under_the_interpreter() -> None:
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
    options = {"num_warps": warps}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.asm["cubin"]
    ptx: str = found.asm["ptx"]
    return ptx


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cast, "_tuned", {})


@pytest.mark.long
@pytest.mark.parametrize(("narrow", "of", "into"), [(True, "*u32", "*u16"), (False, "*u16", "*u32")])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_cast_compiles_to_reads_and_writes_of_vectors(config: LaunchConfig, narrow: bool, of: str, into: str) -> None:
    ptx = compiled(
        cast._kernel, {"codes": of, "copied": into, "count": "i32"}, config.warps, WIDEN=not narrow, BLOCK=config.block
    )
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


# --- which config runs


def test_on_a_cpu_the_fallback_runs_and_nothing_is_measured() -> None:
    assert tune("cast", CPU, pytest.fail) == {}  # type: ignore[arg-type]
    assert best_config("cast", CPU, 1 << 20) is None


def test_what_was_not_measured_runs_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast, "environment_key", str)
    assert best_config("cast", GPU, 1 << 20) is None


def test_the_fastest_config_is_found_once_for_each_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(cast, "environment_key", str)
    now: list[tuple[int, LaunchConfig | None]] = []
    runs = 0

    def trial(nbytes: int, config: LaunchConfig | None) -> Any:
        def run() -> None:
            nonlocal runs
            runs += 1
            now[:] = [(nbytes, config)]

        return run

    def us(run: Any, device: torch.device) -> float:
        ((nbytes, config),) = now
        return 10.0 if config is None else 20.0 - CONFIGS.index(config) * 8 if nbytes > 1 << 20 else 30.0

    monkeypatch.setattr(cast, "shortest_us", us)
    found = tune("cast", GPU, trial)
    assert list(found.values()) == [None, None, CONFIGS[-1], CONFIGS[-1]]
    assert runs == 4 * (1 + len(CONFIGS))
    assert [best_config("cast", GPU, nbytes) for nbytes in (5, 2 << 20, 17 << 20, 1 << 40)] == [
        None,
        None,
        CONFIGS[-1],
        CONFIGS[-1],
    ]
    monkeypatch.setattr(cast, "_tuned", {})
    assert best_config("cast", GPU, 17 << 20) is None
    assert tune("cast", GPU, pytest.fail) == found  # type: ignore[arg-type]
    assert best_config("cast", GPU, 17 << 20) == CONFIGS[-1]


def test_sizes_that_have_no_room_are_left_out_until_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(cast, "environment_key", str)
    monkeypatch.setattr(cast, "shortest_us", lambda run, device: run())
    tried: list[int] = []

    def trial(nbytes: int, config: LaunchConfig | None) -> Any:
        tried.append(nbytes)
        return lambda: 1.0 if config == CONFIGS[nbytes > 1 << 20] else 2.0

    assert tune("cast", GPU, trial, 100_000) == {} and best_config("cast", GPU, 1 << 20) is None
    tune("cast", GPU, trial, 2 << 20)
    assert max(tried) == 1 << 20 and best_config("cast", GPU, 16 << 20) == CONFIGS[0]
    tune("cast", GPU, trial)
    tune("cast", GPU, pytest.fail, 2 << 20)  # type: ignore[arg-type]
    assert best_config("cast", GPU, 16 << 20) == CONFIGS[1]


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements for "cuda" are found for tensors, whose device has an index."""
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(cast, "environment_key", lambda device: "a GPU")
    monkeypatch.setattr(cast, "_tuned", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cast, "shortest_us", lambda run, device: 1.0 if run() else 2.0)
    tune("cast", torch.device("cuda"), lambda nbytes, config: lambda: config == CONFIGS[2])
    assert best_config("cast", GPU, 1 << 20) == CONFIGS[2]
    assert best_config("cast", torch.device("cuda", 1), 1 << 20) is None
