"""Submodules that ask for values which never repeat run as they are after eight captures, if a plan with them fits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.counted_experts import EXPERTS, ROWS, WIDTH, Experts
from tests.support.faults import ROOM

LINE = r"part\S* counted_experts\.py:\d+: nonzero has results of sizes"


class Net(nn.Module):
    """Experts behind a layer, or a submodule that can't run as it is: it returns a view of its argument."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(WIDTH, WIDTH), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.first(x).relu()).square().mean()


class Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: int((x > 0).sum()) % ROWS + 1]


class Whole(Experts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def trained(model: nn.Module, steps: int, budget: Any = ROOM, **options: Any) -> Any:
    """Train beside eager, compare all bits, and return the compiled module."""
    other = copy.deepcopy(model)
    compiled = memgraph.compile(model, budget, time_limit=0.3, **options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    for step in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        loss, expected = compiled(x), other(x)
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None)
            assert mine.grad is None or its.grad is None or torch.equal(mine.grad, its.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        report = compiled.plan
        assert report.measured is None or report.measured <= report.peak <= report.budget
    return compiled


@pytest.mark.long
def test_after_eight_captures_the_submodule_that_asks_runs_as_it_is() -> None:
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match=LINE + r"[\s\S]*from now on part runs as it is, in one op") as caught:
        compiled = trained(Net(Experts()), 14)
    assert sum("graphs were captured" in str(warning.message) for warning in caught) == 1
    assert [row.path for row in compiled.plan.opaque] == ["part"]
    assert len(compiled.plans) == 9


@pytest.mark.long
@pytest.mark.parametrize("opaque", [False, ["first"]])
def test_with_other_parts_chosen_the_warning_says_what_to_choose(opaque: Any) -> None:
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match=LINE + r"[\s\S]*with opaque=\['part'\] part runs as it is, in one op; or"):
        compiled = trained(Net(Experts()), 10, opaque=opaque)
    assert "part" not in [row.path for row in compiled.plan.opaque]


@pytest.mark.long
def test_where_no_plan_with_it_fits_it_is_captured_for_each_value() -> None:
    torch.manual_seed(0)
    model = Net(Experts())
    compiled = memgraph.compile(copy.deepcopy(model), ROOM, opaque=["part"], accumulate=False)
    compiled(torch.randn(ROWS, WIDTH)).backward()
    least = compiled.plan.peak - 30_000
    with pytest.warns(RuntimeWarning, match=r"with opaque=\['part'\]"):
        compiled = trained(model, 11, least, accumulate=False)
    assert not compiled.plan.opaque


@pytest.mark.long
def test_a_submodule_that_cannot_run_as_it_is_is_captured_for_each_value() -> None:
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match=r"with opaque=\['part'\]"):
        compiled = trained(Net(Cut()), 11)
    assert not compiled.plan.opaque


@pytest.mark.long
def test_the_whole_model_is_captured_for_each_value() -> None:
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match=r"each new value is captured and planned: compute with torch\.where"):
        compiled = trained(Whole(), 10)
    assert not compiled.plan.opaque
    assert len(compiled.experts) == EXPERTS
