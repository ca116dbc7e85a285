"""A pipeline names what it refuses, and says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph import CaptureError, MemgraphError
from tests.support.ranks import on_ranks

X, Y = torch.randn(8, 8), torch.randn(8, 8)


class Small(nn.Module):
    """Two layers and their loss."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.a, self.b, self.what = nn.Linear(8, 8), nn.Linear(8, 8), what
        self.norm = nn.BatchNorm1d(8) if what == "norm" else nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.what == "fails":
            raise IndexError("no such layer")
        x = x.mul_(2.0) if self.what == "writes" else x
        x = self.b(self.norm(self.a(x)).tanh())
        return x if self.what == "many" else F.mse_loss(x, y)


def step(model: nn.Module, **given: Any) -> None:
    pipe = memgraph.pipeline(model, "1GB", **{"chunks": 2, **given})
    pipe.step(x=X.clone(), y=Y.clone())


class Scaled(nn.Linear):
    """A loss with parameters."""


def hooked() -> nn.Module:
    model = Small()
    model.a.register_forward_hook(lambda *_: None)
    return model


def compiled() -> nn.Module:
    model = Small()
    model.a = memgraph.compile(model.a, "1GB")  # type: ignore[assignment]
    return model


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a loss with parameters": (Small, {"loss": Scaled(8, 1)}, ValueError, "loss has parameters, as weight"),
    "a compiled model": (lambda: memgraph.compile(Small(), "1GB"), {}, TypeError, "model is compiled already"),
    "a compiled part": (compiled, {}, TypeError, r"model\.a is compiled already"),
    "a number as balance": (Small, {"balance": 3}, TypeError, "balance=3; give a list of integers"),
    "places that are none": (Small, {"balance": [7]}, ValueError, r"the others behind each other at some of \d+"),
    "an unknown replicated name": (
        Small,
        {"replicated": ["typo"]},
        ValueError,
        "'typo', and forward of Small takes x, y",
    ),
    "forward hooks": (hooked, {}, CaptureError, "has forward hooks, as a has"),
    "a batch that is written": (lambda: Small("writes"), {}, CaptureError, "writes into a tensor of the batch"),
    "a result that is no number": (lambda: Small("many"), {}, CaptureError, r"of shapes \[\(4, 8\)\]"),
    "one row in a BatchNorm": (lambda: Small("norm"), {"chunks": 8}, ValueError, "with chunks=8 one has a single row"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_by_name(what: str) -> None:
    made, given, kind, words = REFUSED[what]
    with pytest.raises(kind, match=words):
        step(made(), **given)


def test_the_optimizer_is_none_only_where_none_was_asked_for() -> None:
    with pytest.raises(MemgraphError, match="call prepare"):
        _ = memgraph.pipeline(Small(), "1GB", optimizer=torch.optim.SGD).optimizer
    assert memgraph.pipeline(Small(), "1GB").optimizer is None


def _told(rank: int) -> list[str]:
    texts = []
    for what in ("values", "frozen", "fails"):
        torch.manual_seed(0)
        model = Small("fails" if what == "fails" and rank == 1 else "")
        if what == "values" and rank == 1:
            torch.nn.init.zeros_(model.b.weight)
        try:
            pipe = memgraph.pipeline(model, "1GB", 2)
            pipe.step(x=torch.ones(8, 8), y=torch.ones(8, 8))
            for parameter in pipe.parameters():
                parameter.requires_grad_(False)
            pipe.step(x=torch.ones(8, 8), y=torch.ones(8, 8))
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_ranks_that_differ_name_the_parameter_and_share_an_error() -> None:
    first, second = on_ranks(2, _told)
    assert first == second
    assert first[0].startswith("AgreementError: the ranks disagree on parameter b.weight of the model")
    assert first[1].startswith("AgreementError: the ranks disagree on requires_grad of parameter a.weight")
    assert first[2] == "IndexError: no such layer"
