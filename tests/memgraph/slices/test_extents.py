"""slices="auto" where slices need more than the whole step: then it is planned whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.planning.attempts import attempts
from memgraph.profile.memory_meter import resident_bytes
from memgraph.slices.step_cuts import ATTEMPTS
from tests.support.compare import same_gradients
from tests.support.sliced_models import VOCABULARY, WIDTH, cross_entropy
from tests.support.sliced_training import BATCH, LENGTH, ROOM, assert_near, batch, step

INNER, WIDE = 32, 384
FLOAT = 4
ROWS = BATCH * LENGTH
LARGE = FLOAT * ROWS * WIDE  # three values of so many bytes exist together
GRADIENTS = FLOAT * INNER * (VOCABULARY + ROWS)  # of the head and of what it reads, which slices make before backward


class Beside(nn.Module):
    """A head, and behind it a larger layer of ops that mix columns and that no slice divides.

    In slices the gradients of the head exist while the larger layer runs; whole, its logits run again behind it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, INNER), nn.Linear(INNER, VOCABULARY, bias=False)
        self.wide = nn.Linear(INNER, WIDE, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.embedding(tokens))
        loss = cross_entropy(self.head(x), labels)
        return loss + self.wide(x).cumsum(-1).cumsum(-1).square().mean()


def beside() -> nn.Module:
    torch.manual_seed(0)
    return Beside()


# Bytes for which the step has a plan, and the step in slices has none.
WHOLE = resident_bytes([*beside().parameters(), *batch()]) + 3 * LARGE + GRADIENTS // 2


@pytest.fixture
def only_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "auto" not try the whole step."""
    monkeypatch.setattr(attempts, "ATTEMPTS", tuple(cuts for cuts in ATTEMPTS if cuts.extent != "whole"))


def smallest(budget: int = WHOLE * 3 // 4) -> int:
    """Return the least budget that the error for a smaller one names."""
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(beside(), *batch(), budget=budget, slices="auto", offload=None, time_limit=1)
    return caught.value.smallest


@pytest.mark.long
@pytest.mark.usefixtures("only_slices")
def test_slices_alone_do_not_fit() -> None:
    assert smallest(WHOLE) > WHOLE


@pytest.mark.long
def test_a_step_that_fits_whole_alone_is_planned_whole() -> None:
    module = beside()
    eager = copy.deepcopy(module)
    model = memgraph.compile(module, WHOLE, slices="auto", offload=None)
    assert torch.equal(step(model), step(eager))
    assert same_gradients(module, eager)  # nothing is added in another order
    report = model.plan
    assert report.slices == () and report.measured is not None and report.measured <= report.peak <= WHOLE


@pytest.mark.long
def test_the_error_names_the_least_budget_of_all_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    least = smallest()
    monkeypatch.setattr(attempts, "ATTEMPTS", tuple(cuts for cuts in ATTEMPTS if cuts.extent != "whole"))
    assert least < smallest()


class Column(nn.Module):
    """Layers that see one row, so that a chain divides columns: gradients of weights are written row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().sum()


@pytest.mark.parametrize("fates", [False, True], ids=["as planned", "given up"])
def test_gradients_that_are_written_row_by_row_add_up_over_calls(
    fates: bool, request: pytest.FixtureRequest, tmp_path: Any
) -> None:
    if fates:
        request.getfixturevalue("given_up")
    torch.manual_seed(0)
    module = Column()
    eager = copy.deepcopy(module)
    offload: dict[str, Any] = {"offload": "disk", "spill_dir": str(tmp_path)} if fates else {"offload": None}
    model = memgraph.compile(module, ROOM, slices={"up": 4}, **offload)
    inputs = torch.randn(4, 1, WIDTH)
    for each in (model, eager):
        (each(inputs[0]) * 3.0).backward()
    assert gradients_by_row(model)
    for each in (model, eager):
        each(inputs[1]).backward()
    assert_near(module, eager)
    for each in (model, eager):
        each.zero_grad(set_to_none=False)
        for x in inputs:
            each(x).backward()
    assert_near(module, eager)
    report = model.plan
    assert report.measured is not None and report.measured <= report.peak


def gradients_by_row(model: memgraph.CompiledModule) -> set[str]:
    """Return the gradients into which parts are written."""
    rules = {name: rule for cut in model.plan.slices for name, rule in cut.rules}
    gradients = {value for kind, value in model.plan.forecast.trace.outputs if kind == "gradient"}
    return {name for name in gradients if name in rules and rules[name].makes is not None}
