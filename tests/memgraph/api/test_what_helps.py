"""Options that are not on are planned, and named if they help; what is named holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.api.compiler import make_planner
from memgraph.api.what_helps import Attempts, Help
from memgraph.options.compile_options import CompileArguments

WIDTH, ROWS = 64, 1024


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
            for _ in range(3)
        ]
    )


def _mean(y: Tensor) -> Tensor:
    return y.square().mean()


def _refused(budget: int, **given: Any) -> memgraph.BudgetError:
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(_model(), torch.randn(ROWS, WIDTH), budget=budget, loss=_mean, **given)
    return caught.value


def test_a_budget_error_of_plan_names_options_that_fit_and_they_do() -> None:
    needs = memgraph.plan(_model(), torch.randn(ROWS, WIDTH), budget="1GB", loss=_mean).peak
    error = _refused(int(0.3 * needs), offload=None)
    said = str(error).partition("What else would help, by forecast:\n")[2]
    assert said  # how many are tried depends on how long that takes
    for line in said.splitlines():
        option, answer = re.fullmatch(r"  (\S+(?:, \S+)?): (.*)", line).groups()  # type: ignore[union-attr]
        changed: dict[str, Any] = eval(f"dict({option})", {"torch": torch})
        size = re.match(r"([\d.]+) (MB|B) will do", answer)
        budget: Any = f"{size[1]}{size[2]}" if size else int(0.3 * needs)
        x = torch.randn(ROWS, WIDTH)
        report = memgraph.plan(_model(), x, budget=budget, loss=_mean, **{"offload": None, **changed})
        assert report.peak <= report.budget
        assert size or answer.startswith("fits, ")


def test_an_option_that_is_on_is_not_named() -> None:
    given: dict[str, Any] = {"offload": "auto", "wire_dtype": torch.bfloat16, "microbatches": 2, "slices": "auto"}
    assert "What else would help" not in str(_refused(500_000, **given))


def test_micro_batches_of_a_model_whose_rows_depend_on_each_other_are_not_named() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _model()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.body(x - x.mean(0))
            return y

    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(Centred(), torch.randn(ROWS, WIDTH), budget=1_000_000, offload=None)
    assert "microbatches=" not in str(caught.value)


def test_trying_updates_in_backward_leaves_the_optimizer_as_it_was() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    before = dict(vars(optimizer))
    hooks = len(optimizer._optimizer_load_state_dict_post_hooks)
    given: CompileArguments = {"optimizer": optimizer, "loss": _mean}
    attempts = Attempts(make_planner, model, (torch.randn(ROWS, WIDTH),), {}, 1_000_000, given, planned_s=0.0)
    error = memgraph.BudgetError("", 10**8, 10**9)
    assert {help.option for help in attempts.better_than(error)}
    assert vars(optimizer) == before
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == hooks
    assert not optimizer.state


def test_a_budget_far_below_what_works_has_nothing_tried() -> None:
    error = memgraph.BudgetError("", 10_000, 10**6)
    assert Attempts(pytest.fail, _model(), (torch.randn(ROWS, WIDTH),), {}, 10_000, {}).better_than(error) == []


def test_a_plan_that_costs_little_has_nothing_tried() -> None:
    model, x = _model(), torch.randn(ROWS, WIDTH)
    report = memgraph.plan(model, x, budget="1GB")
    assert Attempts(pytest.fail, model, (x,), {}, "1GB", {}).better_than(report) == []


def test_a_help_says_what_it_gives() -> None:
    assert str(Help("microbatches=2", 1_460_000, float("inf"), 0.0)) == "microbatches=2: 1.5 MB will do"
    assert str(Help('slices="auto"', 1, 1100.0, 1000.0)) == 'slices="auto": fits, 1.1 ms, +10.0%'
    assert str(Help('slices="auto"', 1, 1100.0, 0.0)) == 'slices="auto": fits, 1.1 ms'
