"""Where blocks of rows were looked for, the error and the report say which large weights stay whole, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from passes.slices.whole_weight import Reason, WholeWeight
from tests.support.block_models import WIDTH, WORDS, Words, head_in_blocks, words
from tests.support.streamed_state import TINY

pytestmark = pytest.mark.usefixtures("small_windows")
GRADIENT = "its gradient is made by aten.embedding_dense_backward.default, which makes no rows of it"


def counted() -> Words:
    """Return a model whose lookup scales its gradient by counts, which are of all rows."""
    model = Words()
    model.token.scale_grad_by_freq = True
    return model


def plan(model: nn.Module, budget: int, **options: Any) -> memgraph.Report:
    options["optimizer"] = torch.optim.Adam(model.parameters())
    return memgraph.plan(model, *words(), budget=budget, time_limit=0, **options)


def error(model: nn.Module, **options: Any) -> str:
    with pytest.raises(memgraph.BudgetError) as caught:
        plan(model, TINY, **options)
    return str(caught.value)


def test_an_error_says_what_keeps_weights_whole() -> None:
    text = error(counted())
    assert "\nWeights that stay whole, where blocks of rows were looked for:\n" in text
    assert f"\n  token.weight: {GRADIENT}\n" in f"{text}\n"
    assert "\n  head.weight: no larger than token.weight, which stays whole\n" in f"{text}\n"


def test_an_error_names_the_option_that_does() -> None:
    text = error(Words(), fuse_update=True)
    assert "\n  token.weight, head.weight: updated in backward, with fuse_update=True\n" in f"{text}\n"


@pytest.mark.long
@head_in_blocks
def test_an_error_says_nothing_where_all_large_weights_are_cut() -> None:
    assert "stay whole" not in error(Words())


@pytest.mark.long
@head_in_blocks
def test_a_report_says_so_and_is_read_back() -> None:
    model = counted()
    model.token = nn.Embedding(WORDS // 2, WIDTH, scale_grad_by_freq=True)
    now, then = words()
    options: dict[str, Any] = {"optimizer": torch.optim.Adam(model.parameters()), "time_limit": 0}
    report = memgraph.plan(model, now // 2, then, budget=WORDS * WIDTH * 4, **options)
    assert [row.weight for row in report.row_blocks] == ["head.weight"]
    nbytes = WORDS // 2 * WIDTH * 4
    whole = WholeWeight("token.weight", nbytes, Reason.GRADIENT, "aten.embedding_dense_backward.default")
    assert report.whole_weights == (whole,)
    assert f"large weights that stay whole:\n  token.weight: {GRADIENT}\n" in str(report)
    assert memgraph.Report.from_json(report.to_json()).whole_weights == (whole,)


def test_a_report_of_whole_weights_that_fit_names_none() -> None:
    assert plan(counted(), 1 << 30).whole_weights == ()


@pytest.mark.long
@head_in_blocks
def test_the_bound_is_one_of_plans_with_the_same_blocks() -> None:
    model = Words()
    report = plan(model, WORDS * WIDTH * 4, accumulate=False)
    assert report.row_blocks and "proven: " in str(report)
    assert "plan with these blocks of rows " in str(report)
    assert "with these" not in str(plan(model, 16 << 20, accumulate=False))
