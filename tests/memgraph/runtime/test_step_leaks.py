"""Nothing stays: what is saved for backward dies with it, and files go with the module."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
from torch.nn import functional as F

import memgraph
from memgraph.runtime.step_run import StepRun
from passes.schedule.schedule import Placement
from tests.support.faults import batch, fresh, living, open_files, step


@pytest.mark.long
def test_what_is_saved_for_backward_dies_with_backward(fate: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[StepRun] = []
    real = StepRun.forward

    def watched(self: StepRun, *args: Any) -> Any:
        runs.append(self)
        return real(self, *args)

    monkeypatch.setattr(StepRun, "forward", watched)
    _, compiled = fresh()
    step(compiled)
    assert [run.saved for run in runs] == [None]
    assert runs[0].lease is None
    compiled.zero_grad()
    before = living()
    for _ in range(3):
        F.mse_loss(compiled(batch()), batch()).backward()
        compiled.zero_grad()
    runs.clear()
    assert living() <= before


def test_a_compiled_module_that_is_dropped_gives_back_its_files(fate: Placement) -> None:
    before = open_files()
    for _ in range(2):
        _, compiled = fresh()
        compiled(batch()).sum().backward()
        compiled(batch())
        del compiled
    assert open_files() <= before


def test_a_run_without_room_in_the_tier_is_closed_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        staging = 0

        def bind(self, bound: object) -> None: ...

        def lease(self) -> Any:
            raise memgraph.SpillError("no room")

        def close(self) -> None: ...

    lost: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lost.append)
    with pytest.raises(memgraph.SpillError):
        StepRun(mock.Mock(), Full())
    StepRun.__new__(StepRun)
    gc.collect()
    assert not lost
