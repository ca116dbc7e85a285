"""Where torch's allocator has no bytes for a step that is within its budget, the error says what is in the way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import memgraph
from memgraph.runtime.out_of_memory import explain_out_of_memory
from memgraph.runtime.step_run import StepRun
from tests.support.models import net

GPU = torch.device("cuda", 0)


@pytest.fixture(name="report")
def _report(monkeypatch: pytest.MonkeyPatch) -> memgraph.Report:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 700)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1000)
    report = memgraph.plan(net(), torch.randn(4, 32), budget=1 << 30)
    return replace(report, machine=replace(report.machine, device="cuda:0"))


def test_a_want_of_memory_is_explained(report: memgraph.Report) -> None:
    with pytest.raises(torch.OutOfMemoryError) as error, explain_out_of_memory(report, GPU):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    first, second = str(error.value).splitlines()
    assert first == "CUDA out of memory. Tried to allocate 20.00 MiB."
    assert f"planned to take {report.peak} bytes at most, of a budget of {report.budget}; " in second
    assert "has given out 700 on cuda:0, and holds 300 more between those: start the process with " in second


@pytest.mark.long
def test_a_run_explains_errors_of_both_halves(report: memgraph.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise torch.OutOfMemoryError("no")

    step = memgraph.compile(net(), 1 << 30)
    monkeypatch.setattr(StepRun, "explain_errors", staticmethod(partial(explain_out_of_memory, report, GPU)))
    loss = step(torch.randn(4, 32)).sum()
    monkeypatch.setattr(StepRun, "_run", refuses)
    for half in (loss.backward, lambda: step(torch.randn(4, 32))):
        with pytest.raises(torch.OutOfMemoryError, match="holds 300 more"):
            half()


def test_before_a_step_has_run_the_report_says_what_room_the_allocator_has(report: memgraph.Report) -> None:
    room = (report.budget - report.peak) / 1e6
    assert f"{room:.1f} MB of the budget are left for what torch's allocator holds beyond that" in str(report)
    assert "left for what" not in str(replace(report, held=report.peak))
    assert "left for what" not in str(replace(report, machine=replace(report.machine, device="cpu")))
