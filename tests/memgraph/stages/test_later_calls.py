"""Mini-batches of other kinds than the first run in the stages that have their parameters, as in the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from tests.support.ranks import on_ranks
from tests.support.staged_models import Batch, in_turn, loss_of, made, wide

from .test_gradients import same

MODELS = ("gpt2", "tied", "batch norm", "skips", "frozen")


def _later(rank: int, name: str, schedule: str) -> dict[str, Any]:
    """Return what differs from the plain model in mini-batches of other kinds, and the losses beside its own."""
    model, batch = made(name, 12)
    plain = copy.deepcopy(model)
    pipe = memgraph.pipeline(model, "1GB", 4, schedule=schedule)
    found: dict[str, Any] = {}
    for rows in (12, 10, 3, 12):  # 3 3 3 3, then 3 3 3 1, 1 1 1, and the first again
        some = {key: value[:rows] for key, value in batch.items()}
        plain, expected = in_turn(plain, some, 4)
        loss = pipe.step(**some)
        wanted = {key: each.grad for key, each in plain.named_parameters()}
        wrong = [key for key, each in pipe.named_parameters() if not same(each.grad, wanted[key], name)]
        found[f"{rows} rows, {len(found)}"] = wrong, None if loss is None else loss.item() == pytest.approx(expected)
    return found | {"evaluated": _evaluated(pipe, model, plain, batch)}


def _evaluated(pipe: Any, model: nn.Module, plain: nn.Module, batch: Batch) -> tuple[list[str], bool | None]:
    """Return the parameters whose gradients change, and if the loss is that of the plain model."""
    before = {key: each.grad.clone() for key, each in pipe.named_parameters() if each.grad is not None}
    model.eval()
    plain.eval()
    with torch.no_grad():
        loss = pipe.step(**batch)
        parts = zip(*(value.chunk(4) for value in batch.values()), strict=True)
        losses = [loss_of(plain(**dict(zip(batch, each, strict=True)))) for each in parts]
    changed = [key for key, each in pipe.named_parameters() if not same(each.grad, before[key], "")]
    model.train()
    return changed, None if loss is None else loss.equal(sum(0.25 * each for each in losses))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_later_kinds_of_mini_batches_are_as_in_the_plain_model(name: str, ranks: int) -> None:
    results = on_ranks(ranks, _later, name, "gpipe" if name == "skips" else "1f1b")
    for what in results[0]:
        assert [each[what] for each in results] == [([], None)] * (ranks - 1) + [([], True)], what


class Switched(nn.Module):
    """A model whose last layer is used in training alone, or first in evaluation."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.last, self.first = nn.Linear(4, 4), first

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.training and self.first:
            x = self.last(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(self.last(x) if self.training else x, y)


def _switched(rank: int, first: bool) -> tuple[str, str, bool]:
    torch.manual_seed(0)
    model, batch = Switched(first), {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    plain = copy.deepcopy(model).eval()
    pipe = memgraph.pipeline(model, "1GB", 4)
    pipe.step(**batch)
    model.eval()
    error, loss = "", None
    try:
        with torch.no_grad():
            loss = pipe.step(**batch)
    except (ValueError, memgraph.AgreementError) as raised:
        error = str(raised)
    model.train()
    pipe.step(**batch)  # goes on
    return error, "" if loss is None else str(loss.isclose(plain(**batch)).item()), True


def test_an_evaluation_without_the_last_layer_is_right() -> None:
    assert [each[:2] for each in on_ranks(2, _switched, False)] == [("", ""), ("", "True")]


def test_an_evaluation_that_reads_parameters_in_another_order_is_refused_and_training_goes_on() -> None:
    for error, _, went_on in on_ranks(2, _switched, True):
        assert ("which stage 1 has" in error or "runs behind" in error, went_on) == (True, True), error


def _evaluated_first(rank: int) -> list[Any]:
    """Return what differs from the plain model if evaluation comes first, or the meta device, or inference mode."""
    found: list[Any] = []
    for name, mode, is_meta, training in (
        ("batch norm", torch.no_grad, False, False),
        ("gpt2", torch.inference_mode, True, False),
        ("tied", torch.no_grad, False, True),
    ):
        model, batch = made(name, 12)
        plain = copy.deepcopy(model)
        if is_meta:
            model = model.to("meta")
        pipe = memgraph.pipeline(model, "1GB", 4, optimizer=lambda given: torch.optim.SGD(given, 0.1))
        for each in (model, plain):
            each.train(training)
        with mode():
            few = {key: value[:4].clone() for key, value in batch.items()}
            pipe.prepare(**few)
            pipe.load_state_dict(plain.state_dict())
            loss = pipe.step(**few)
            parts = zip(*(value.chunk(4) for value in few.values()), strict=True)
            losses = [loss_of(plain(**dict(zip(few, each, strict=True)))) for each in parts]
        found.append(loss is None or loss.equal(sum((0.25 * each for each in losses), torch.zeros(()))))
        modes = {each.training for each in model.modules()}
        for each in (model, plain):
            each.train()
        plain, _ = in_turn(plain, batch, 4)
        pipe.step(**batch)
        wanted = {key: each.grad for key, each in plain.named_parameters()}
        wrong = [key for key, each in pipe.named_parameters() if not same(each.grad, wanted[key], name)]
        assert pipe.optimizer is not None
        pipe.optimizer.step()
        found += [modes == {training}, wrong]
    return found


@pytest.mark.long
def test_an_evaluation_before_the_first_training_is_as_in_the_plain_model() -> None:
    assert on_ranks(2, _evaluated_first) == [[True, True, []] * 3] * 2


def _too_large(rank: int) -> bool:
    """Return whether training runs within budgets in which evaluation of four times the rows comes first."""
    model, batch = wide(32)
    loose = memgraph.pipeline(wide(32)[0], "1GB", 4)
    loose.prepare(**{key: value[:8] for key, value in batch.items()})
    pipe = memgraph.pipeline(model, [int(1.2 * each) for each in loose._latest.peaks], 4)
    with torch.no_grad():
        pipe.step(**batch)
    pipe.step(**{key: value[:8] for key, value in batch.items()})
    return pipe.peak <= pipe.given.budgets[rank]


@pytest.mark.long
def test_an_evaluation_that_comes_first_may_have_more_rows_than_training_has_room_for() -> None:
    assert on_ranks(2, _too_large) == [True, True]
