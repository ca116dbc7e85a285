"""Splitting a batch, joining the results, and refusing modules whose rows depend on each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.microbatch.microbatches import microbatch_sizes

Forward = Callable[..., Any]


class Does(nn.Module):
    """A linear layer, and what a test makes of it."""

    def __init__(self, forward: Forward, *parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.parts = nn.Linear(4, 4), nn.ModuleList(parts)
        self.does = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(self.layer, *self.parts, *args, **kwargs)


def compiled(module: nn.Module, **wishes: Any) -> memgraph.CompiledModule:
    all_wishes: dict[str, Any] = {"microbatches": 2} | wishes
    return memgraph.compile(module, "1GB", **all_wishes)


@pytest.mark.parametrize(
    ("rows", "count", "parts"),
    [(7, 4, (2, 2, 2, 1)), (5, 4, (2, 1, 1, 1)), (2, 4, (1, 1)), (6, 3, (2, 2, 2)), (1, 3, (1,)), (0, 3, (0,))],
)
def test_no_part_is_empty_and_none_is_much_larger(rows: int, count: int, parts: tuple[int, ...]) -> None:
    assert microbatch_sizes([torch.ones(rows, 2)], count) == parts
    assert microbatch_sizes([3, torch.ones(()), torch.ones(rows)], count) == parts


def rich(layer: nn.Module, x: Tensor, scale: Tensor, *, sizes: dict[str, Tensor], name: str) -> dict[str, Any]:
    y = layer(x) * scale
    return {"y": y, "pair": (y.relu(), sizes["rows"] + 1), "name": name, "same": x, "count": 3}


@pytest.mark.long
@pytest.mark.parametrize("rows", [5, 2, 1, 0])
def test_outputs_are_those_of_the_whole_batch(rows: int) -> None:
    module, x, scale = Does(rich), torch.randn(rows, 4, requires_grad=True), torch.randn(4)
    plain, its = copy.deepcopy(module), x.detach().clone().requires_grad_()
    sizes = {"rows": torch.arange(rows)}
    ours = compiled(module, microbatches=3)(x, scale, sizes=sizes, name="a")
    theirs = plain(its, scale, sizes=sizes, name="a")
    assert list(ours) == list(theirs)
    assert ours.pop("name") == theirs.pop("name")
    torch.testing.assert_close(ours, theirs)
    ours["y"].square().sum().backward()
    theirs["y"].square().sum().backward()
    torch.testing.assert_close(x.grad, its.grad)
    torch.testing.assert_close(module.layer.weight.grad, plain.layer.weight.grad)


def test_inference_runs_in_parts_too() -> None:
    module, x = Does(lambda layer, x: layer(x)), torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(module.eval())(x), module(x))


def test_a_copy_has_the_same_parts() -> None:
    model = copy.deepcopy(compiled(Does(lambda layer, x: layer(x).square().mean()), reduction="mean"))
    model(torch.randn(4, 4)).backward()
    assert set(model.state_dict()) == {"layer.weight", "layer.bias"}
    assert {op.microbatch for op in model.plan.forecast.trace.ops} == {0, 1, 2}


def test_dropout_draws_anew_for_every_part() -> None:
    module = Does(lambda layer, drop, x: drop(layer(x)), nn.Dropout(0.5))
    with torch.no_grad():
        module.layer.weight.zero_()
        module.layer.bias.fill_(1.0)
    out = compiled(module)(torch.randn(64, 4))
    out.sum().backward()
    assert 0 < (out == 0).sum() < out.numel()
    assert not torch.equal(out[:32], out[32:])
    assert module.layer.bias.grad is not None
    assert torch.equal(module.layer.bias.grad, (out != 0).sum(0) * 2.0)


@pytest.mark.parametrize("mode", [True, False])
def test_batch_norm_is_refused_where_it_looks_at_the_batch(mode: bool) -> None:
    module = Does(lambda layer, norm, x: norm(layer(x)), nn.BatchNorm1d(4)).train(mode)
    if mode:
        with pytest.raises(memgraph.CaptureError, match=r"changes buffer parts\.0\.running_mean"):
            compiled(module)(torch.randn(6, 4))
        assert module.state_dict()["parts.0.num_batches_tracked"] == 0
    else:
        x = torch.randn(6, 4)
        torch.testing.assert_close(compiled(module)(x), module(x))


MIXING: dict[str, Forward] = {
    "batch norm without statistics": lambda layer, x: F.batch_norm(layer(x), None, None, training=True),
    "a mean": lambda layer, x: layer(x) - layer(x).mean(0),
    "a softmax over rows": lambda layer, x: layer(x).softmax(0),
    "the next row": lambda layer, x: layer(x).roll(1, 0),
    "all rows together": lambda layer, x: layer(x) @ layer(x).sum(0),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MIXING)
def test_rows_that_depend_on_each_other_are_refused(name: str) -> None:
    with pytest.raises(memgraph.CaptureError, match="depends on other rows"):
        compiled(Does(MIXING[name]))(torch.randn(6, 4))
    compiled(Does(MIXING[name]), microbatches=1)(torch.randn(6, 4)).sum().backward()


SCALARS: dict[str, tuple[Forward, str]] = {
    "a sum that was said to be a mean": (lambda layer, x: layer(x).square().sum(), "mean"),
    "a mean that was said to be a sum": (lambda layer, x: layer(x).square().mean(), "sum"),
    "a norm": (lambda layer, x: layer(x).norm(), "sum"),
    "a variance": (lambda layer, x: layer(x).var(), "mean"),
    "a largest": (lambda layer, x: layer(x).max(), "mean"),
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_scalar_that_is_not_what_was_said_is_refused(name: str) -> None:
    forward, reduction = SCALARS[name]
    with pytest.raises(memgraph.CaptureError, match=f"is no {reduction} over the rows"):
        compiled(Does(forward), reduction=reduction)(torch.randn(6, 4))


def cross_entropy(layer: nn.Module, x: Tensor, target: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(layer(x).flatten(0, 1), target.flatten(), **how)


@pytest.mark.long
@pytest.mark.parametrize("how", [{}, {"weight": torch.tensor([1.0, 2.0, 0.5, 3.0])}, {"label_smoothing": 0.1}])
def test_targets_that_do_not_count_have_no_share_in_a_mean(how: dict[str, Any]) -> None:
    module = Does(lambda layer, x, target: cross_entropy(layer, x, target, **how))
    plain, model = copy.deepcopy(module), compiled(module, reduction="mean", microbatches=3)
    for seed in range(3):
        torch.manual_seed(seed)
        x, target = torch.randn(7, 3, 4), torch.randint(0, 4, (7, 3))
        if seed:
            target[torch.rand(7, 3) < 0.5] = -100
            target[3:5] = -100  # a whole part
        module.zero_grad()
        plain.zero_grad()
        ours, theirs = model(x, target), plain(x, target)
        torch.testing.assert_close(ours, theirs)
        ours.backward()
        theirs.backward()
        torch.testing.assert_close(module.layer.weight.grad, plain.layer.weight.grad)
    assert len(model._kept.steps) == 1


def test_a_mean_over_some_targets_with_more_beside_it_is_none_over_rows() -> None:
    module = Does(lambda layer, x, target: cross_entropy(layer, x, target) + layer(x).square().mean())
    target = torch.randint(0, 4, (6, 3))
    target[0, 1:] = -100
    with pytest.raises(memgraph.CaptureError, match="is no mean over the rows"):
        compiled(module, reduction="mean")(torch.randn(6, 3, 4), target)


def test_a_scalar_of_which_nothing_is_said_is_refused() -> None:
    with pytest.raises(memgraph.CaptureError, match='reduction="mean"'):
        compiled(Does(lambda layer, x: layer(x).mean()))(torch.randn(6, 4))


def test_what_has_as_many_rows_by_accident_is_refused() -> None:
    module = Does(lambda layer, x, mask: layer(x) @ x.mT + mask)
    with pytest.raises(memgraph.CaptureError, match="as many rows as the first"):
        compiled(module)(torch.randn(3, 3, 4), torch.randn(3, 3))
    compiled(module)(torch.randn(3, 3, 4), torch.randn(1, 3, 3))


def test_what_is_returned_has_rows_or_is_a_scalar() -> None:
    with pytest.raises(memgraph.CaptureError, match="whose first dimension is not that of the batch"):
        compiled(Does(lambda layer, x: (layer(x), layer.weight[:2] * 2)))(torch.randn(4, 4))
    with pytest.raises(memgraph.CaptureError, match="no rows of a whole"):
        compiled(Does(lambda layer, x: (layer(x), layer.weight[:3] * 2)))(torch.randn(4, 4))


def test_what_depends_on_the_number_of_rows_is_refused() -> None:
    with pytest.raises(memgraph.CaptureError, match="depends on how many rows there are"):
        compiled(Does(lambda layer, x: layer(x).square().sum(1) / len(x)))(torch.randn(6, 4))
    with pytest.raises(memgraph.CaptureError, match="returns 5 for 5 rows and 10 for more"):
        compiled(Does(lambda layer, x: (layer(x), len(x))))(torch.randn(6, 4))
    with pytest.raises(memgraph.CaptureError, match="other forms"):
        compiled(Does(lambda layer, x: list(layer(x))))(torch.randn(6, 4))


DROPPED: dict[str, tuple[Forward, str | None, str]] = {
    "a sum": (lambda layer, x: F.dropout(layer(x), 0.1).sum(), "mean", "is no mean"),
    "a mean": (lambda layer, x: F.dropout(layer(x), 0.1).square().mean(), "sum", "is no sum"),
    "a share": (lambda layer, x: F.dropout(layer(x), 0.1) / len(x), None, "how many rows"),
    "noise": (lambda layer, x: (layer(x) + torch.randn_like(x)) / len(x), None, "how many rows"),
    "a permutation": (lambda layer, x: layer(x)[torch.randperm(len(x))], None, "depends on other rows"),
    "choices": (lambda layer, x: layer(x).softmax(1).multinomial(1), None, "draws with aten.multinomial"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_random_numbers_hide_nothing(name: str) -> None:
    forward, reduction, why = DROPPED[name]
    with pytest.raises(memgraph.CaptureError, match=why):
        compiled(Does(forward), reduction=reduction)(torch.randn(6, 4))


def test_random_numbers_are_no_reason_to_refuse() -> None:
    module = Does(lambda layer, x: (F.dropout(layer(x), 0.5) * torch.rand_like(x)).square().mean())
    compiled(module, reduction="mean")(torch.randn(6, 4)).backward()


PLACED: dict[str, Forward] = {
    "the first of a table": lambda layer, x: layer(x) + torch.arange(64.0)[: len(x), None],
    "an identity": lambda layer, x: layer(x) + torch.eye(len(x), 4),
    "a branch for the whole batch": lambda layer, x: layer(x) if len(x) != 12 else 2 * layer(x),
    "a branch for a part": lambda layer, x: layer(x) if len(x) != 6 else 2 * layer(x),
    "numbers of rows": lambda layer, x: (layer(x), torch.arange(len(x))),
}


@pytest.mark.parametrize("name", PLACED)
def test_what_depends_on_a_place_in_the_batch_is_refused(name: str) -> None:
    with pytest.raises(memgraph.CaptureError, match="where it stands"):
        compiled(Does(PLACED[name]))(torch.randn(12, 4))


LARGEST: dict[str, Forward] = {
    "a largest": lambda layer, x: layer(x) / layer(x).detach().abs().max(),
    "a threshold that is rarely passed": lambda layer, x: torch.where(layer(x).max() > 20.0, 1.0, 2.0) * layer(x),
    "the second": lambda layer, x: layer(x) * (layer(x) >= layer(x).topk(2, 0)[0][-1]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LARGEST)
@pytest.mark.parametrize("row", range(5))
def test_a_row_that_stands_out_is_found_wherever_it_is(name: str, row: int) -> None:
    x = torch.randn(8, 4)
    x[row] *= 1.5
    with pytest.raises(memgraph.CaptureError, match="depends on other rows"):
        compiled(Does(LARGEST[name]))(x)


def test_indices_that_are_cut_by_accident_are_named() -> None:
    module = Does(lambda layer, x, order: layer(x)[order])
    with pytest.raises(memgraph.CaptureError, match=r"1 \(8,\) torch.int64"):
        compiled(module)(torch.randn(8, 4), torch.arange(7, -1, -1))


def test_a_call_without_a_batch_is_refused() -> None:
    with pytest.raises(memgraph.CaptureError, match="no argument is a tensor"):
        compiled(Does(lambda layer, x: layer.weight * x))(2.0)


def test_a_mean_over_an_empty_batch_is_what_it_is_in_eager() -> None:
    module = Does(lambda layer, x: layer(x).square().mean())
    assert compiled(module, microbatches=4, reduction="mean")(torch.randn(0, 4)).isnan()
