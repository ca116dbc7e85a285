"""Whatever a module may be called with and may return, the compiled one takes and returns."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.planning import variants
from memgraph.planning.variants import PLANS
from tests.support.compare import ROOM, Fact, assert_alike, batch, both, tight
from tests.support.models import Function


def test_zeros_of_either_sign_are_different_arguments() -> None:
    def loop(model: Any) -> list[Fact]:
        return [model(batch(), scale).signbit() for scale in (0.0, -0.0)]

    assert_alike(loop, lambda: Function(lambda linear, x, scale: linear(x) * scale))


@tight
def test_batches_of_changing_shape() -> None:
    def loop(model: Any) -> list[Fact]:
        found: list[Fact] = []
        for rows in (6, 3, 6, 4, 3):
            loss = model(batch(rows)).square().mean()
            loss.backward()
            found.append(loss)
        return found

    assert_alike(loop)


def test_no_more_than_a_few_large_steps_are_kept_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "NODES", 0)
    compiled: Any = memgraph.compile(Function(lambda linear, x: linear(x)), ROOM)
    for rows in range(2, PLANS + 4):
        compiled(batch(rows)).sum().backward()
        compiled.zero_grad()
        compiled(batch(2)).sum().backward()
        compiled.zero_grad()
    assert len(compiled._kept.steps) == PLANS
    made = list(compiled._kept.steps)
    compiled(batch(2))
    compiled(batch(PLANS + 3))
    assert len(compiled._kept.steps) == PLANS
    assert {id(step) for step in compiled._kept.steps} == {id(step) for step in made}


def test_the_oldest_step_stays_as_long_as_it_is_the_one_that_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "PLANS", 1)
    compiled: Any = memgraph.compile(Function(lambda linear, x: linear(x)), ROOM)
    for rows in (2, 3, 2, 3):  # each is measured, and timed
        compiled(batch(rows)).sum().backward()
        compiled.zero_grad()
    monkeypatch.setattr(variants, "NODES", 0)  # as a better plan that has a far tier makes them too many
    compiled(batch(2)).sum().backward()
    assert len(compiled._kept.steps) == 1


def test_inputs_of_other_strides_are_planned_anew() -> None:
    def loop(model: Any) -> list[Fact]:
        square = batch(8)
        inputs = [square, square.t(), square[:1].expand(8, 8), batch(16)[::2]]
        return [model(x).square().mean() for x in inputs]

    assert_alike(loop)


@tight
def test_arguments_and_results_in_any_nesting() -> None:
    Point = namedtuple("Point", "a b")

    def function(linear: Any, x: dict[str, list[Tensor]], *, scale: float = 1.0, mask: Tensor | None = None) -> Any:
        y = linear(x["in"][0] + x["in"][1]) * scale
        return {"point": Point(y, [y.detach(), None, "text"]), "scale": scale, "mask": y if mask is None else y * mask}

    def loop(model: Any) -> list[Fact]:
        found: list[Fact] = []
        for mask in (None, torch.ones(6, 1), torch.zeros(6, 1)):
            for scale in (2.0, -0.5):
                result = model({"in": [batch(), batch(seed=2)]}, scale=scale, mask=mask)
                assert result["scale"] == scale
                assert result["point"].b[1:] == [None, "text"]
                (result["point"].a.sum() + result["mask"].square().sum()).backward()
                found += [result["point"].a, result["mask"]]
        return found

    assert_alike(loop, lambda: Function(function))


@dataclass
class Result:
    """No pytree."""

    loss: Tensor
    logits: Tensor
    name: str


@tight
def test_a_dataclass_comes_out_as_one() -> None:
    def loop(model: Any) -> list[Fact]:
        found: list[Fact] = []
        for step in range(2):
            result = model(batch(seed=step))
            assert (type(result), result.name) == (Result, "it")
            result.loss.backward()
            found += [result.loss, result.logits]
        return found

    assert_alike(loop, lambda: Function(lambda linear, x: Result((y := linear(x)).sum(), y.exp(), "it")))


@tight
def test_a_slice_may_be_an_argument() -> None:
    assert_alike(lambda model: [model(batch(), slice(1, 3))], lambda: Function(lambda linear, x, rows: linear(x)[rows]))


@tight
def test_outputs_that_are_integers_have_no_gradient() -> None:
    def loop(model: Any) -> list[Fact]:
        values, best = model(batch())
        assert not best.requires_grad
        values.sum().backward()
        return [values, best]

    assert_alike(loop, lambda: Function(lambda linear, x: linear(x).max(dim=1)))


@tight
def test_an_input_that_is_handed_through_is_the_very_input() -> None:
    def loop(model: Any) -> list[Fact]:
        x = batch().requires_grad_()
        inner = x * 2
        through, y = model(inner)
        assert through is inner
        (through.sum() + y.square().sum()).backward()
        return [x.grad, y]

    assert_alike(loop, lambda: Function(lambda linear, x: (x, linear(x))))


@both
def test_outputs_that_are_views_of_inputs_parameters_and_one_another() -> None:
    def function(linear: Any, x: Tensor) -> Any:
        y = linear(x)
        return x[1:].t(), linear.weight, linear.bias[2:], y, y[:, :3], y

    def loop(model: Any) -> list[Fact]:
        x = batch().requires_grad_()
        found = model(x)
        assert found[3] is found[5]
        torch.stack([part.square().sum() for part in found]).sum().backward()
        return [*found, x.grad]

    assert_alike(loop, lambda: Function(function))


@tight
def test_outputs_may_be_changed_in_place_where_backward_does_not_need_them() -> None:
    def loop(model: Any) -> list[Fact]:
        out = model(batch())
        out.mul_(2)
        out[0] = 0
        out.square().mean().backward()
        return [out]

    assert_alike(loop, lambda: Function(lambda linear, x: linear(x)))


@pytest.mark.parametrize("shape", ["view", "matmul"])
def test_outputs_that_are_views_of_values_may_be_changed_in_place(shape: str) -> None:
    def loop(model: Any) -> list[Fact]:
        out = model(batch().unflatten(0, (2, 3)))
        out.mul_(2)
        out.square().mean().backward()
        return [out]

    assert_alike(loop, lambda: Function(lambda linear, x: linear(x).view(-1) if shape == "view" else linear(x)))


@tight
def test_inputs_that_forward_changes_in_place_are_changed() -> None:
    def function(linear: Any, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return linear(x)

    def loop(model: Any) -> list[Fact]:
        x = batch()
        model(x).square().mean().backward()
        return [x]

    assert_alike(loop, lambda: Function(function))


class InPlace(nn.Module):
    """Changes what it is given, in one of several ways, and reads it again."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        if self.way == "first layer":
            return self.layer(x.relu_())
        if self.way == "a view":
            x.t()[2:5].mul_(3)
            return self.layer(x)
        if self.way == "returned":
            return x.relu_()
        if self.way == "without autograd":
            with torch.no_grad():
                x.mul_(2)
            return self.layer(x)
        read = self.layer(x.clone())
        x.mul_(2)
        x.add_(self.layer.weight[0])
        return read * x


@pytest.mark.long
@tight
@pytest.mark.parametrize("slices", [False, True], ids=["a whole tensor", "a slice of one"])
@pytest.mark.parametrize("way", ["first layer", "a view", "returned", "without autograd", "with a parameter"])
def test_forward_may_change_an_input_in_place_that_is_the_result_of_an_op(way: str, slices: bool) -> None:
    def loop(model: Any) -> list[Fact]:
        found: list[Fact] = []
        for used in (False, True):
            x = batch().requires_grad_()
            given = (torch.cat((x, x), 1) * 2)[:, :8] if slices else x * 2
            out = model(given)
            (out.square().sum() + (given.cos().sum() if used else 0.0)).backward()
            found += [x.grad, out, given]
        return found

    assert_alike(loop, lambda: InPlace(way))


def test_a_leaf_is_refused_where_the_result_of_an_op_was_planned_for() -> None:
    compiled = memgraph.compile(InPlace("first layer"), ROOM)
    compiled(batch().requires_grad_() * 2).sum().backward()
    compiled.zero_grad()
    leaf = batch().requires_grad_()
    with pytest.raises(memgraph.CaptureError, match="forward changes in place a leaf that requires a gradient"):
        compiled(leaf)
    assert torch.equal(leaf, batch())


@pytest.mark.parametrize("again", [lambda x: x, lambda x: x.view_as(x)])
def test_inputs_that_come_to_share_memory_are_noticed(again: Any) -> None:
    def function(linear: Any, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5)
        return linear(x) * y

    module = Function(function)
    compiled, x = memgraph.compile(module, ROOM), batch()
    compiled(batch(), batch())
    copy = x.clone()
    expected = module(copy, again(copy))
    try:
        assert torch.equal(compiled(x, again(x)), expected)
    except memgraph.CaptureError:
        return
