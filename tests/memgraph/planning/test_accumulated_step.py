"""A budget without room for gradients that are there already: named at the first call, before any step."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
import passes
from memgraph.capture.capture import capture
from memgraph.options.compile_options import CompileOptions
from memgraph.planning import accumulated_step, capture_step
from memgraph.planning.accumulated_step import plan_accumulated
from memgraph.planning.progress import Progress
from memgraph.planning.search import PlanSearch
from memgraph.profile.memory_meter import resident_bytes
from memgraph.runtime.released_outputs import most_released
from passes import Machine, PlanResult, Trace, parse, predict
from tests.oracle.network import layers
from tests.support.compare import same_gradients
from tests.support.models import Net
from tests.support.smallest_budget import smallest_of

ROOM = "1GB"
ROOT = Path(__file__).parents[3]
EXACT = """
import torch, memgraph
from tests.memgraph.planning.test_accumulated_step import batch, net
from memgraph.system.page_pool import pool_counts
model = net()
peak = memgraph.plan(model, batch(), budget="1GB").peak
compiled = memgraph.compile(model, peak, offload=None)
for _ in range(3):
    compiled(batch()).sum().backward()
    model.zero_grad()
print(compiled.plan.plan, compiled.plan.adding > peak, pool_counts().held)
"""


def net() -> nn.Module:
    """Parameters and gradients are most of it."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(6)))


def batch() -> torch.Tensor:
    return torch.ones(8, 96)


def needs(accumulate: bool) -> int:
    return smallest_of(lambda: memgraph.plan(net(), batch(), budget=1, offload=None, accumulate=accumulate))


@pytest.mark.long
def test_a_budget_between_the_two_steps_is_warned_of_at_the_first_call_with_the_bytes_of_the_second() -> None:
    model = memgraph.compile(net(), needs(False), offload=None)
    with pytest.warns(RuntimeWarning, match="zero_grad") as caught:
        loss = model(batch()).sum()
    loss.backward()
    said = model.plan.adding
    assert said > model.plan.budget and f"budget={said}" in str(caught[0].message) and f"{said} B" in str(model.plan)
    with pytest.raises(memgraph.BudgetError):
        model(batch())
    roomy = memgraph.compile(net(), said, offload=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            roomy(batch()).sum().backward()
    assert "adds to gradients" not in str(roomy.plans[0])


@pytest.mark.long
def test_a_step_that_fits_keeps_its_pages_although_one_that_adds_to_gradients_needs_a_plan() -> None:
    """Runs in a process of its own: once freed memory is returned to the system, it always is."""
    done = subprocess.run([sys.executable, "-c", EXACT], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "() True 0\n"


def test_a_first_call_that_warns_of_no_second_one_has_looked_for_its_plan_as_that_one_does() -> None:
    """It counts on a caller who lets go of outputs, where no other plan fits."""
    torch.manual_seed(0)
    ours, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.randn(64, 64)
    options: dict[str, Any] = {"offload": None, "time_limit": 1}
    lent = smallest_of(lambda: memgraph.compile(ours, 1, accumulate=True, **options)(x))
    model = memgraph.compile(ours, lent - x.nbytes // 2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="what is computed between forward and backward")  # the loss here
        for _ in range(2):
            model(x).square().mean().backward()
    assert all(report.peak <= report.budget for report in model.plans)


def test_an_error_names_one_budget_which_does_for_a_call_that_adds_to_gradients_too() -> None:
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.compile(net(), 1000, offload=None)(batch())
    named = {int(found) for found in re.findall(r"(?:Give budget=|a plan was found is )(\d+)", str(caught.value))}
    alone = needs(False)
    assert named == {caught.value.smallest} and f"needs {alone}: accumulate=False" in str(caught.value)
    assert caught.value.smallest > alone


@pytest.mark.long
def test_a_loop_that_says_that_it_accumulates_is_refused_at_the_first_call_or_never() -> None:
    with pytest.raises(memgraph.BudgetError):
        memgraph.compile(net(), needs(False), offload=None, accumulate=True)(batch())
    model = memgraph.compile(net(), needs(True), offload=None, accumulate=True)
    theirs = net()
    for _ in range(3):
        for one in (model, theirs):
            one(batch()).sin().sum().backward()
        assert model.plan.measured is not None and model.plan.measured <= model.plan.peak <= model.plan.budget
    assert len(model.plans) == 1
    assert same_gradients(model, theirs)


def test_a_loop_that_says_that_it_does_not_accumulate_hears_nothing() -> None:
    model = memgraph.compile(net(), needs(False), offload=None, accumulate=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(batch()).sum().backward()
            model.zero_grad()
    assert model.plan.adding == 0


def test_accumulate_and_an_update_in_backward_exclude_each_other() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="accumulate=True"):
        memgraph.compile(model, ROOM, optimizer=optimizer, fuse_update=True, accumulate=True)


def test_a_call_that_adds_to_gradients_is_not_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []

    def noting(*args: Any, **named: Any) -> Any:
        captures.append(1)
        return capture(*args, **named)

    monkeypatch.setattr(capture_step, "capture", noting)
    model, theirs = memgraph.compile(Net(), ROOM), Net()
    theirs.load_state_dict(model.state_dict())
    for _ in range(3):
        for one in (model, theirs):
            torch.manual_seed(1)
            one(torch.ones(4, 8)).square().sum().backward()
    assert len(captures) == 1 and len(model.plans) == 2
    assert same_gradients(model, theirs)


def test_an_evaluation_counts_the_gradients_that_lie_there() -> None:
    model, x = memgraph.compile(net(), ROOM), batch()
    with torch.no_grad():
        model(x)
    alone = model.plan.peak
    model(x).sum().backward()
    with torch.no_grad():
        model(x)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    evaluated = model.plans[-1]
    assert evaluated.peak == alone + resident_bytes(gradients)
    assert evaluated.measured == evaluated.peak


@pytest.mark.parametrize(("until", "asked"), [(0.0, 0), (math.inf, 1)])
def test_after_its_time_only_the_quick_passes_look_for_a_plan_that_adds_to_gradients(
    until: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, searched = layers(6), list[Machine]()
    tight = Machine(predict(most_released(trace), Machine(0)).peak - 1)

    def search(trace: Trace, machine: Machine) -> PlanResult:
        searched.append(machine)
        raise passes.BudgetError("none", machine.budget, machine.budget + 1)

    quickly = plan_accumulated(trace, tight, [()], search, until)
    assert quickly.plan and quickly.needed <= tight.budget and not searched
    monkeypatch.setattr(accumulated_step, "FITTING", ())
    found = plan_accumulated(trace, tight, [()], search, until)
    assert found.plan is None and found.needed > tight.budget and len(searched) == asked


def test_a_step_whose_room_for_gradients_was_told_has_a_plan_although_a_search_finds_none() -> None:
    """The plan by which the first call knew."""
    trace = parse(
        "x = input()  # f32[4] | makes x:100\na = relu(x)  # f32[4] | makes a:60 | 1 us\n"
        "b = relu(a)  # f32[4] | makes b:60 | 1 us\nbackward:\nc = mul(a, b)  # f32[4] | makes c:1 | 1 us\n"
        "return gradient c\n"
    )

    class Vain(PlanSearch):
        def search(self, trace: Trace, machine: Machine) -> PlanResult:
            raise passes.BudgetError("none", machine.budget, 0)

    search = Vain(CompileOptions(None), Progress(), math.inf)
    peak = predict(trace, Machine(1000)).peak
    assert replace(search, known=())(trace, Machine(peak)).forecast.peak == peak
    with pytest.raises(passes.BudgetError):
        replace(search, known=())(trace, Machine(peak - 1))
    with pytest.raises(passes.BudgetError):
        search(trace, Machine(peak))
