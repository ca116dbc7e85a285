"""Arguments that differ between ranks, and models that can't be in stages, are refused on all ranks before a step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph import AgreementError, StagesBudgetError
from tests.support.ranks import on_ranks
from tests.support.staged_models import made

LIMIT = 20.0  # seconds, far below the timeout of the group


def _error(run: Any) -> tuple[str, str, list[str], float]:
    begin = time.monotonic()
    with pytest.raises(Exception) as caught:
        run()
    notes = getattr(caught.value, "__notes__", [])
    return type(caught.value).__name__, str(caught.value), list(notes), time.monotonic() - begin


def _refused(rank: int, what: str) -> tuple[str, str, list[str], float]:
    torch.manual_seed(0)
    model, batch = made("gpt2", 8)
    odd = rank == 1
    given: dict[str, Any] = {"budget": "1GB", "chunks": 4}
    if what == "model" and odd:
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
    if what == "budget" and odd:
        given["budget"] = "2GB"
    if what == "chunks" and odd:
        given["chunks"] = 0
    if what == "all chunks":
        given["chunks"] = 0
    if what == "rows":
        batch = {key: value[:0] for key, value in batch.items()}
    if what == "batch" and odd:
        batch = {key: value.flip(0) for key, value in batch.items()}
    if what == "fewer rows" and odd:
        batch = {key: value[:4] for key, value in batch.items()}
    if what == "no loss":
        model = nn.Linear(4, 4)
        batch = {"input": torch.randn(8, 4)}
    if what == "stages":
        model, batch = Small(), {"x": torch.randn(8, 1)}
    if what == "balance":
        given["balance"] = [0, 10_000]
    if what == "branch":
        model, batch = Branch(), {"input": torch.ones(8, 4)}
    if what == "tiny":
        given["budget"] = 50_000
    if what == "again":
        memgraph.pipeline(model, **given).prepare(**batch)
    return _error(lambda: memgraph.pipeline(model, **given).step(**batch))


class Small(nn.Module):
    """One op."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.sin()


class Branch(nn.Linear):
    """A branch on the value of a tensor."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y.sum() if input.sum() > 0 else y.mean()


def test_a_hook_on_a_gradient_is_refused() -> None:
    model, batch = made("gpt2", 8)
    next(model.parameters()).register_hook(torch.sin)
    with pytest.raises(memgraph.CaptureError, match="the hook"):
        memgraph.pipeline(model, "1GB", 4).step(**batch)


def test_a_branch_is_refused_with_its_line_and_what_to_do() -> None:
    words = r"the value is True at test_errors\.py:\d+.*compute both branches and choose with torch.where"
    with pytest.raises(memgraph.CaptureError, match=words):
        memgraph.pipeline(Branch(), "1GB", 2).step(torch.ones(8, 4))


DIFFER = AgreementError.__name__
REFUSED = {
    "model": (DIFFER, DIFFER),
    "budget": (DIFFER, DIFFER),
    "chunks": (DIFFER, "ValueError"),
    "all chunks": ("ValueError", "ValueError"),
    "rows": ("ValueError", "ValueError"),
    "batch": (DIFFER, DIFFER),
    "fewer rows": (DIFFER, DIFFER),
    "no loss": ("CaptureError", "CaptureError"),
    "stages": ("ValueError", "ValueError"),
    "balance": ("ValueError", "ValueError"),
    "branch": ("CaptureError", "CaptureError"),
    "tiny": (StagesBudgetError.__name__, StagesBudgetError.__name__),
    "again": ("ValueError", "ValueError"),
}


def _all_refused(rank: int) -> dict[str, tuple[str, str, list[str], float]]:
    return {what: _refused(rank, what) for what in REFUSED}


@pytest.mark.long
def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    results = on_ranks(2, _all_refused)
    for what, kinds in REFUSED.items():
        assert tuple(each[what][0] for each in results) == kinds, (what, [each[what] for each in results])
        assert max(each[what][3] for each in results) < LIMIT
