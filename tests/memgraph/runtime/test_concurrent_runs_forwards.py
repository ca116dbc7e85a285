"""Several forwards before the first backward: planned for, they keep the budget; not planned for, they are said."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.runtime import step
from tests.support.compare import same_gradients
from tests.support.smallest_budget import smallest_of

ROOM = "1GB"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)), nn.Linear(64, 2))


def batches(count: int) -> list[Tensor]:
    return [torch.randn(256, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def summed(model: Any, given: Sequence[Tensor]) -> None:
    """One loss of all forwards."""
    first, *rest = [model(x) for x in given]
    torch.stack([(first - other).square().mean() for other in rest]).sum().backward()


def apart(model: Any, given: Sequence[Tensor]) -> None:
    """A loss each, all made before the first backward."""
    for loss in [model(x).square().mean() for x in given]:
        loss.backward()


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("share", [1.0, 0.55])
@pytest.mark.parametrize("loop", [summed, apart])
def test_all_open_forwards_together_keep_the_budget(loop: Any, share: float, count: int) -> None:
    given = batches(count)
    options: dict[str, Any] = {"forwards": count, "offload": None, "time_limit": 0}
    full = memgraph.plan(net(), given[0], budget=ROOM, **options).peak
    ours, theirs = net(), net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = memgraph.compile(ours, int(share * full), accumulate=False, **options)
        for _ in range(4):  # the third may have another plan
            for one in (model, theirs):
                one.zero_grad()
                loop(one, given)
        ours.zero_grad()
        _, allocated = measure_peak(lambda: loop(model, given))  # all that torch gives, the loss included
    assert same_gradients(ours, theirs)
    report = model.plan
    assert allocated is not None and report.measured is not None
    assert resident_bytes([*ours.parameters(), *given]) + allocated.peak <= report.peak <= report.budget
    assert report.measured <= report.peak and bool(report.plan) is (share < 1)
    assert report.forwards == count and str(report).startswith("fits")


@pytest.mark.long
def test_accumulation_over_several_open_forwards_keeps_the_budget() -> None:
    given, ours, theirs = batches(2), net(), net()
    options: dict[str, Any] = {"forwards": 2, "offload": None, "time_limit": 0, "accumulate": True}
    budget = int(0.7 * memgraph.plan(net(), given[0], budget=ROOM, **options).peak)
    model = memgraph.compile(ours, budget, **options)
    for _ in range(4):
        summed(model, given)
        summed(theirs, given)
    gradients = [p.grad for p in ours.parameters() if p.grad is not None]
    there = resident_bytes([*ours.parameters(), *given, *gradients])
    _, allocated = measure_peak(lambda: summed(model, given))
    summed(theirs, given)
    assert same_gradients(ours, theirs)
    assert allocated is not None and there + allocated.peak <= model.plan.peak <= budget


def test_gradients_of_open_forwards_are_summed_in_place() -> None:
    given, ours = [x[:4].clone() for x in batches(2)], net()
    options: dict[str, Any] = {"forwards": 2, "offload": None, "time_limit": 0, "accumulate": True}
    budget = smallest_of(lambda: memgraph.plan(net(), given[0], budget=1, **options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = memgraph.compile(ours, budget, **options)
        for _ in range(3):
            summed(model, given)
    gradients = [p.grad for p in ours.parameters() if p.grad is not None]
    there = resident_bytes([*ours.parameters(), *given, *gradients])
    _, allocated = measure_peak(lambda: summed(model, given))
    assert allocated is not None and there + allocated.peak <= budget  # no room for a sum beside both terms


@pytest.mark.long
def test_the_update_is_not_beside_open_forwards() -> None:
    model, x = net(), batches(1)[0][:8]
    optimizer = torch.optim.Adam(model.parameters())
    one, two = (memgraph.plan(model, x, budget=ROOM, optimizer=optimizer, forwards=count) for count in (1, 2))
    assert two.forecast.trace.other_nbytes > 0
    assert one.forecast.total[-1] == two.forecast.total[-1]


@pytest.mark.long
def test_the_smallest_budget_that_the_error_names_is_one() -> None:
    given = batches(2)
    options: dict[str, Any] = {"forwards": 2, "offload": None, "time_limit": 0, "accumulate": False}
    smallest = smallest_of(lambda: memgraph.plan(net(), given[0], budget=1, **options))
    assert memgraph.plan(net(), given[0], budget=smallest, **options).peak <= smallest


class Scored(nn.Module):
    """Returns a loss of its own, and what that loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers(x)
        return y.square().mean(), y


def of_both_outputs(model: Any, given: Sequence[Tensor]) -> None:
    (one, a), (two, b) = (model(x) for x in given)
    (one + two + (a - b).square().mean()).backward()


@pytest.mark.long
def test_a_loss_of_all_that_several_forwards_return_runs_with_the_smallest_budget_that_the_error_names() -> None:
    given, ours, theirs = batches(2), Scored(), Scored()
    options: dict[str, Any] = {"forwards": 2, "offload": None, "time_limit": 0}
    smallest = smallest_of(lambda: memgraph.compile(Scored(), 1, **options)(given[0]))
    model = memgraph.compile(ours, smallest, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for one in (model, theirs):
                of_both_outputs(one, given)
    assert same_gradients(ours, theirs)


def test_forwards_that_were_not_planned_for_are_warned_of_before_they_run_and_reported() -> None:
    given, ours = batches(2), net()
    budget = memgraph.plan(net(), given[0], budget=ROOM).peak
    model = memgraph.compile(ours, budget, offload=None, accumulate=False)
    first = model(given[0])
    with pytest.warns(RuntimeWarning, match=f"2 forwards are open at once.*budget of {budget}.*forwards=2") as caught:
        second = model(given[1])
    (first - second).square().mean().backward()
    said, report = int(str(caught[0].message).split("may take ")[1].split()[0]), model.plan
    assert report.measured is not None
    assert budget < report.measured <= said == report.together
    assert str(report).startswith("over the budget") and "2 forwards were open at once" in str(report)


def test_a_pair_that_comes_after_the_first_step_is_measured_as_well() -> None:
    given = batches(2)
    budget = memgraph.plan(net(), given[0], budget=ROOM).peak
    model = memgraph.compile(net(), budget, offload=None, accumulate=False)
    for _ in range(3):
        model(given[0]).sum().backward()
        model.zero_grad()
    assert model.plan.measured is not None and model.plan.measured <= budget
    with pytest.warns(RuntimeWarning, match="2 forwards"):
        summed(model, given)
    assert model.plan.measured > budget


def test_as_many_open_forwards_are_warned_of_once_however_many_steps_have_them() -> None:
    given = batches(2)
    model = memgraph.compile(net(), memgraph.plan(net(), given[0], budget=ROOM).peak, offload=None, accumulate=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):  # the third may have another plan
            summed(model, given)
            model.zero_grad()
    assert sum("forwards are open" in str(one.message) for one in caught) == 1


def test_forwards_that_never_have_a_backward_are_not_warned_of_for_ever() -> None:
    x = batches(1)[0]
    model = memgraph.compile(net(), memgraph.plan(net(), x, budget=ROOM).peak, offload=None, accumulate=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = [model(x) for _ in range(3 * step.MANY)]
    said = [str(one.message) for one in caught if "forwards are open" in str(one.message)]
    assert len(held) > len(said) == step.MANY - 1
    assert "forwards=3" in said[1] and "torch.no_grad()" in said[-1]


def test_what_fits_is_not_warned_of() -> None:
    model = memgraph.compile(net(), ROOM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summed(model, batches(3))
    assert model.plan.forwards == 3


@pytest.mark.parametrize("other", [{"fuse_update": True}, {"cuda_graphs": True}])
def test_what_knows_of_one_forward_is_refused(other: dict[str, Any]) -> None:
    model = net()
    with pytest.raises(ValueError, match="forwards="):
        memgraph.compile(model, ROOM, optimizer=torch.optim.SGD(model.parameters()), forwards=2, **other)


def test_forwards_that_were_planned_for_are_not_advised_to_be() -> None:
    """Two sets of gradients beside those that exist are more than the plan of a call that adds to them counts."""
    options: dict[str, Any] = {"forwards": 2, "offload": None, "time_limit": 0, "accumulate": True}
    given = [x[:4] for x in batches(2)]  # small beside the gradients
    budget = smallest_of(lambda: memgraph.plan(net(), given[0], budget=1000, **options))
    model = memgraph.compile(net(), budget, **options)
    with pytest.warns(RuntimeWarning, match="2 forwards are open at once.*; with gradients set to None before them"):
        for _ in range(2):
            summed(model, given)
