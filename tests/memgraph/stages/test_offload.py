"""A stage offloads between forward and backward of each micro-batch, with the gradients of the plain model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from memgraph import BudgetError, SpillError
from memgraph.stages.planned_stage import PlannedStage
from memgraph.storage.file_tier import FileLease, FileTier
from passes import Offload
from tests.support import fast_disk
from tests.support.allocator_meter import compiler, preloaded
from tests.support.forced_plans import offloading
from tests.support.ranks import on_ranks
from tests.support.staged_models import in_turn, made, wide

CASES = [("1f1b", 2), ("zero_bubble", 3), ("interleaved", 2)]


def _stages(pipe: memgraph.Pipeline) -> list[PlannedStage]:
    return [stage for stages in pipe._latest.stages.values() for stage in stages]


def _offloads(pipe: memgraph.Pipeline) -> bool:
    return any(isinstance(each, Offload) for stage in _stages(pipe) for each in stage.plan.choice.plan)


def _wrong(pipe: memgraph.Pipeline, plain: nn.Module) -> list[str]:
    wanted = dict(plain.named_parameters())
    return [key for key, value in pipe.named_parameters() if not torch.equal(value.grad, wanted[key].grad)]  # type: ignore[arg-type]


class _Files:
    """The files that forwards have leased."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open, self.most = set[int](), 0
        self._lease, self._return = FileTier.lease, FileTier.return_file
        patch.setattr(FileTier, "lease", lambda tier: self.leased(tier))
        patch.setattr(FileTier, "return_file", lambda tier, file, process: self.returned(tier, file, process))

    def leased(self, tier: FileTier) -> FileLease:
        taken = self._lease(tier)
        assert taken.file is not None and taken.file not in self.open, "two open forwards share a file"
        self.open.add(taken.file)
        self.most = max(self.most, len(self.open))
        return taken

    def returned(self, tier: FileTier, file: int, process: int) -> None:
        self.open.remove(file)
        self._return(tier, file, process)


def _trained(rank: int, schedule: str, folder: str) -> tuple[list[Any], int, float | None]:
    """Return of four mini-batches whether this rank offloads, what is wrong, and files in use; the most files; the loss
    of evaluation beside that of the plain model."""
    results: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        offloading(patch)
        files, (model, whole) = _Files(patch), made("batch norm", 16)
        pipe = memgraph.pipeline(model, "1GB", 4, schedule=schedule, spill_dir=folder)
        for rows in (16, 16, 14, 16):  # of 14, the last micro-batch is smaller
            batch = {key: value[:rows] for key, value in whole.items()}
            pipe.step(**batch)
            plain, _ = in_turn(made("batch norm", 16)[0], batch, 4)
            results.append([_offloads(pipe), _wrong(pipe, plain), len(files.open)])
            for parameter in pipe.parameters():
                parameter.grad = None
        with torch.no_grad():
            loss = pipe.step(**whole)
        results.append([_offloads(pipe), [], len(files.open)])
        expected = in_turn(made("batch norm", 16)[0], whole, 4)[1]
    return results, files.most, None if loss is None else loss.item() - expected


@pytest.mark.long
@pytest.mark.parametrize("schedule, ranks", CASES)
def test_a_stage_offloads_with_equal_gradients(tmp_path: Path, schedule: str, ranks: int) -> None:
    found = on_ranks(ranks, _trained, schedule, str(tmp_path))
    for results, most, difference in found:
        assert results == [[True, [], 0]] * 4 + [[False, [], 0]]
        assert difference is None or abs(difference) < 1e-6
        assert most > 0
    assert found[0][1] > 1  # several forwards were open at once, each with a file of its own
    assert os.listdir(tmp_path) == []


def _smallest(rank: int) -> tuple[bool, list[str]]:
    """Return whether there was a disk for the smallest budgets that an error names, and other gradients under these."""
    with pytest.MonkeyPatch.context() as patch:
        fast_disk.patched(patch)
        model, batch = wide(16)
        plain, _ = in_turn(model, batch, 4)
        with pytest.raises(BudgetError) as caught:
            memgraph.pipeline(model, "300KB", 4, offload="disk").step(**batch)
        smallest = json.loads(str(caught.value).partition("budget=")[2].partition("]")[0] + "]")
        pipe = memgraph.pipeline(model, smallest, 4, offload="disk")
        pipe.step(**batch)
    return pipe._latest.cut.step.machine.link.works, _wrong(pipe, plain)


@pytest.mark.long
def test_the_smallest_budgets_work_with_a_disk() -> None:
    assert on_ranks(2, _smallest) == [(True, [])] * 2


def _failing(rank: int, bad: int, verb: str) -> tuple[str, str, list[str], float]:
    with pytest.MonkeyPatch.context() as patch:
        offloading(patch)
        model, batch = wide(16)
        pipe = memgraph.pipeline(model, "1GB", 4)
        pipe.step(**batch)
        assert _offloads(pipe)
        if rank == bad:
            _fail(patch, verb)
        begin = time.monotonic()
        with pytest.raises(SpillError) as caught:
            pipe.step(**batch)
    notes = list(getattr(caught.value, "__notes__", []))
    return type(caught.value).__name__, str(caught.value), notes, time.monotonic() - begin


def _fail(patch: pytest.MonkeyPatch, verb: str) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise OSError(5, os.strerror(5))

    patch.setattr(os, verb, fail)


@pytest.mark.long
@pytest.mark.parametrize("bad, verb", [(0, "pwritev"), (1, "preadv")])
def test_a_failing_disk_ends_all_ranks_with_its_error(bad: int, verb: str) -> None:
    for _, text, notes, seconds in on_ranks(2, _failing, bad, verb, meet=False):
        assert "Input/output error" in text
        assert notes == [f"raised in stage {bad}, on rank {bad}"]
        assert seconds < 20.0


@pytest.mark.long
@pytest.mark.skipif(compiler() is None, reason="the second meter needs a C compiler")
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero_bubble", marks=pytest.mark.slow)])
def test_a_rank_that_offloads_keeps_its_budget(tmp_path: Path, schedule: str) -> None:
    child = [sys.executable, "-m", "tests.support.counted_stages", "2", "4", schedule, "wide", "1.0", "disk"]
    output = subprocess.run(child, env=preloaded(tmp_path), capture_output=True, text=True, timeout=300)
    assert output.returncode == 0, output.stderr
    rows = [json.loads(line) for line in output.stdout.splitlines() if line.startswith("{")]
    assert all(row["offloads"] for row in rows)
    for row in rows:
        assert row["kept"] < max(row["counted"]) <= row["forecast"] <= row["budget"]
        for counted, forecast in (row["uneven"], row["evaluated"]):
            assert row["kept"] / 2 < counted <= forecast <= row["budget"]


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"offload": "tape"}, ValueError, "'auto', 'disk' or None"),
        ({"offload": 1}, TypeError, "offload is an int, 1"),
        ({"spill_dir": "/no such folder"}, SpillError, "spill_dir="),
    ],
)
def test_what_is_no_tier_is_refused(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        memgraph.pipeline(nn.Linear(2, 2), "1GB", **given)
