"""The benchmark of the GPU works from end to end, at toy size on a CPU, and no failure of a part takes the rest with it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import bandwidth, beside, contenders, gpu, records, whole
from benchmarks.beside import Figure
from benchmarks.blocks import SHAPES
from benchmarks.contenders import Row, budgets, rows, stack_nbytes, tried, ways
from benchmarks.laps import Laps, Taken
from benchmarks.whole import RULE

CPU = torch.device("cpu")


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which it takes minutes")
def test_it_measures_prints_and_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    monkeypatch.setattr(contenders, "SEARCH", 0.0)
    monkeypatch.setattr(contenders, "OURS", (0.6,))
    monkeypatch.setattr(whole, "SEARCH", 0.0)
    monkeypatch.setattr(gpu, "SHAPES", {"llama-8b": SHAPES["llama-8b"]})
    gpu.main(seconds=1200.0, laps=2, toy=True)  # a busy machine may take long
    shown = capsys.readouterr().out
    written = json.loads(next(tmp_path.glob("cpu/*.json")).read_text())
    names = [(row["name"], row["beside"]) for row in written["rows"]]
    ours = "memgraph, lower=None"
    assert names[:3] == [("eager", ""), ("memgraph", "60%"), ("checkpoint", "")]
    assert names[3:5] == [(ours, "checkpoint"), ("save_on_cpu", "")]
    ran = [row for row in written["rows"] if row["taken"]]
    assert len(ran) == 7 and all(row["taken"]["peak"] <= row["budget"] for row in ran if row["budget"])
    assert [(row["model"], row["name"]) for row in ran if row["tokens"]] == [("7b", "memgraph"), ("7b", RULE)]
    assert not list(tmp_path.glob("cpu/*.new"))
    found = {figure["name"]: figure for figure in written["figures"]}
    assert found["cast to bf16"]["value"] > 0 and found["prices of the ops of llama-8b"]["share"] > 0
    assert {"torch", "triton", "highspy", "date", "command"} <= written.keys()
    assert "memgraph" in shown and "cast to bf16" in shown and str(tmp_path) in shown.replace("\n", "")


def test_without_a_gpu_it_says_so() -> None:
    if not torch.cuda.is_available():
        app = typer.Typer()
        app.command()(gpu.main)
        result = CliRunner().invoke(app, [])
        assert result.exit_code != 0 and "no CUDA device" in result.output


def test_a_way_that_fails_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Row:
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(contenders, "_run", fails)
    found = list(rows("gpt2-xl", SHAPES["gpt2-xl"].toy(), Laps(CPU), 1, lambda: 60.0))
    assert [row.why for row in found] == ["RuntimeError: CUDA out of memory"] * len(ways(CPU))


@pytest.mark.long
def test_what_is_compiled_on_a_gpu_runs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that generates no code, but divides the step as Inductor does."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    monkeypatch.setattr(contenders, "budgets", lambda *_: [])
    chosen = [
        way for way in ways(torch.device("cuda")) if way.compiled and way.name not in ("autoac 0.8", "autoac 0.5")
    ]
    monkeypatch.setattr(contenders, "ways", lambda device: chosen)
    found = {row.name: row for row in rows("gpt2-xl", SHAPES["gpt2-xl"].toy(), Laps(CPU), 1, lambda: 600.0)}
    assert [row.why for row in found.values()] == ["", "", ""]
    peaks = {name: row.taken.peak for name, row in found.items() if row.taken}
    assert peaks["autoac 0.2"] < peaks["compile"], peaks


def test_what_there_is_no_time_for_is_said() -> None:
    row = Row("m", "memgraph", beside="50%", budget=7)
    assert tried(pytest.fail, row, lambda: 0.0) == Row("m", "memgraph", None, "no time left", "50%", 7)


@pytest.mark.parametrize(
    "rows_, figures, status, said",
    [
        ([Row("m", "ours", Taken((1.0,), 1, 0), "3 again, 2 away")], [Figure("copy", 4.0, "GB/s")], 0, ""),
        (
            [Row("m", "ours", why="RuntimeError: no"), Row("m", "x", why="no time left")],
            [],
            1,
            "FAILED m ours: RuntimeError: no\n",
        ),
        (
            [Row("m", "x", why="no time left"), Row("m", "y", why="Overtime: not done in 2 s")],
            [],
            75,
            "no time for m x; m y\n",
        ),
        ([], [Figure("updates: ValueError: no", 0.0, "failed")], 1, "FAILED updates: ValueError: no\n"),
    ],
)
def test_the_exit_status_is_that_of_the_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    rows_: list[Row], figures: list[Figure], status: int, said: str,
) -> None:  # fmt: skip
    """It was 0 whatever they said, so that a stage took a part that had failed, or never ran, for done."""
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu, "_figures", lambda *_: iter(figures))
    monkeypatch.setattr(gpu, "_rows", lambda *_: iter(rows_))
    app = typer.Typer()
    app.command()(gpu.main)
    assert CliRunner().invoke(app, ["--toy"]).exit_code == status
    written = json.loads(next(tmp_path.glob("*/*.json")).read_text())
    assert len(written["rows"]) == len(rows_) and len(written["figures"]) == len(figures)
    capsys.readouterr()
    gpu.status(figures, rows_)
    assert capsys.readouterr().out.endswith(said)


def test_a_described_device_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "is_described", lambda: True)
    with pytest.raises(typer.BadParameter, match="a described device has no figures"):
        gpu.main(toy=True)


def test_what_takes_too_long_is_stopped_and_the_next_is_not() -> None:
    def endless() -> Row:
        while True:
            with contextlib.suppress(Exception):  # as a compiler does, which takes an error for one of its own
                while True:
                    pass

    assert tried(endless, Row("m", "way"), lambda: 0.05).why == "Overtime: not done in 0 s"
    assert tried(lambda: Row("m", "next"), Row("m", "next"), lambda: 60.0) == Row("m", "next")


def test_a_part_that_fails_is_a_figure_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> list[Figure]:
        raise ValueError("no")

    monkeypatch.setattr(bandwidth, "rows", fails)
    found = gpu._figures(CPU, True, lambda: 60.0, ["kernels"])
    assert [(figure.name, figure.unit) for figure in found] == [("kernels: ValueError: no", "failed")]


def test_a_part_that_hangs_is_a_figure_that_says_so_behind_those_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: object) -> Iterator[Figure]:
        yield Figure("copy", 4200.0, "GB/s")
        time.sleep(60)

    monkeypatch.setattr(gpu, "PART", 1.0)  # until when a busy machine has come to the first
    monkeypatch.setattr(bandwidth, "rows", hangs)
    for left, unit in [(60.0, "failed"), (0.9, "no time left")]:  # its own time, and that of all figures
        found = list(gpu._figures(CPU, True, partial(float, left), ["kernels"]))
        assert [figure.name for figure in found] == ["copy", "kernels: Overtime: not done in 1 s"]
        assert found[-1].unit == unit


def test_what_was_found_is_written_before_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> list[Figure]:
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "FOLDER", tmp_path)
    monkeypatch.setattr(bandwidth, "rows", lambda *_: [Figure("copy", 4200.0, "GB/s")])
    monkeypatch.setattr(beside, "rows", stopped)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(seconds=300.0, laps=2, toy=True)
    assert [f["name"] for f in json.loads(next(tmp_path.glob("cpu/*.json")).read_text())["figures"]] == ["copy"]
    assert "4200.0 GB/s" in capsys.readouterr().out


def test_a_part_runs_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    monkeypatch.setattr(whole, "SEARCH", 0.0)
    gpu.main(seconds=1200.0, laps=1, toy=True, part=["7b-rule"])
    written = json.loads(next(tmp_path.glob("cpu/*.json")).read_text())
    assert [row["name"] for row in written["rows"]] == [RULE] and not written["figures"]
    assert list(gpu._rows(Laps(CPU), 1, True, time.perf_counter() + 60, ["copies"])) == []
    with pytest.raises(typer.BadParameter, match="no part is called coffee; these are: kernels, copies, "):
        gpu.main(toy=True, part=["coffee"])


def test_memgraph_gets_the_peak_of_each_way_that_saves_and_shares_of_the_compiled_one() -> None:
    found = {
        "eager": Taken((1.0,), 1300, 0), "compile": Taken((1.0,), 1000, 0),
        "autoac 0.2": Taken((1.0,), 600, 0), "save_on_cpu": Taken((1.0,), 1100, 0),
    }  # fmt: skip
    assert budgets(found, 200) == [("50%", 600), ("25%", 400), ("autoac 0.2", 600)]
    assert budgets({}, 200) == []


def test_ours_comes_right_behind_what_it_stands_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"eager": 9.0, "compile": 8.0, "autoac 0.2": 6.0, "checkpoint": 7.0}

    def run(name: str, way: contenders.Way, *_: object) -> Row:
        return Row(name, way.name, Taken((1.0,), int(peaks.get(way.name, 8.0) * 1e9), 0))

    monkeypatch.setattr(contenders, "_run", run)
    monkeypatch.setattr(contenders, "_ours", lambda row, *_, **__: row)
    found = rows("llama-8b", SHAPES["llama-8b"], Laps(torch.device("cuda")), 1, lambda: 60.0)
    assert [row.name + f" at {row.beside}" * bool(row.beside) for row in found] == [
        "eager", "compile", "memgraph at 50%", "memgraph at 25%", "autoac 0.8",
        "autoac 0.5", "autoac 0.2", "memgraph at autoac 0.2", "compile, checkpoint", "checkpoint",
        "memgraph, lower=None at checkpoint", "save_on_cpu", "memgraph, CUDA graphs at 50%",
    ]  # fmt: skip


def test_what_a_stack_holds_is_known_without_making_it() -> None:
    for shape in SHAPES.values():
        assert 10**8 < stack_nbytes(shape) < 10**10


def test_on_a_gpu_torchs_own_ways_are_measured_first() -> None:
    assert [way.name for way in ways(torch.device("cuda"))] == [
        "eager", "compile", "autoac 0.8", "autoac 0.5", "autoac 0.2", "compile, checkpoint", "checkpoint", "save_on_cpu",
    ]  # fmt: skip
    assert [way.name for way in ways(CPU)] == ["eager", "checkpoint", "save_on_cpu"]
