"""Capture refuses what a graph can't represent, with the line or the name."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.capture.capture import capture
from memgraph.errors import CaptureError
from tests.support.captured_calls import TOKENS, Plain, X


def test_a_numpy_array_of_a_tensor_is_refused_with_its_line() -> None:
    def then(model: Any, h: Tensor) -> Any:
        return h.detach().numpy()

    with pytest.raises(CaptureError, match="a tensor becomes a numpy array") as caught:
        capture(Plain(then), (X,), {})
    assert f"{__file__}:{then.__code__.co_firstlineno + 1} in then" in str(caught.value)


def test_an_op_that_takes_functions_is_refused_with_its_line() -> None:
    def chosen(model: Any, h: Tensor) -> Any:
        return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))

    with pytest.raises(
        CaptureError, match=r"takes functions \(torch.cond.*can't be planned(.|\n)*torch.where"
    ) as caught:
        capture(Plain(chosen), (X,), {})
    assert f"{__file__}:{chosen.__code__.co_firstlineno + 1} in chosen" in str(caught.value)


class Chosen(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda y: y @ self.weight, torch.cos, (x,))


def test_it_is_refused_in_a_submodule_too_which_can_t_run_as_it_is() -> None:
    for opaque in (True, ["1"]):
        model = memgraph.compile(nn.Sequential(nn.Linear(4, 4), Chosen(4, 4)), "1GB", opaque=opaque)
        with pytest.raises(CaptureError, match=r"can't be traced, and torch refuses|takes functions"):
            model(torch.randn(2, 4))


def test_a_users_own_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="broadcast") as caught:
        capture(Plain(lambda m, h: h + torch.ones(3)), (X,), {})
    assert not isinstance(caught.value, CaptureError)


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_a_decision_that_python_draws_is_refused(draw: Callable[[], float]) -> None:
    states = random.getstate(), str(numpy.random.get_state())
    with pytest.raises(CaptureError, match="which would be the same in every step"):
        capture(Plain(lambda m, h: h if draw() < 0.5 else -h), (X,), {})
    assert states == (random.getstate(), str(numpy.random.get_state()))


def reshape(model: Any, h: Tensor) -> Tensor:
    model.mean = h.detach()
    return h


def count(model: Any, h: Tensor) -> Tensor:
    model.table += 1
    return h


def train(model: Any, h: Tensor) -> Tensor:
    return h * model.table


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (reshape, r"assigns torch.float32 \(2, 4\) to buffer mean"),
        (count, "changes the tensor table in place, which is no buffer"),
        (train, "the tensor table requires a gradient but is no parameter"),
    ],
)
def test_what_would_silently_be_lost_is_refused(then: Callable[[Any, Tensor], Any], says: str) -> None:
    model: Any = Plain(then)
    model.table = torch.ones(4, requires_grad=then is train)
    with pytest.raises(CaptureError, match=says):
        capture(model, (X,), {})


def test_a_parameter_that_a_list_has_too_is_refused_by_its_name() -> None:
    model: Any = Plain(lambda m, h: h * m.several[0])
    model.weight = nn.Parameter(torch.ones(4))
    model.several = [model.weight]
    with pytest.raises(CaptureError, match="reads the parameter weight by a list or an object that has it too"):
        capture(model, (X,), {})


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(CaptureError, match="use sparse=False"):
        capture(nn.Embedding(7, 4, sparse=True), (TOKENS,), {})


def test_a_method_of_a_tensor_is_no_result() -> None:
    with pytest.raises(CaptureError, match="returns a function that holds tensors of its call"):
        capture(Plain(lambda m, h: h.sum), (X,), {})


def test_a_leaf_that_forward_makes_and_returns_is_warned_of() -> None:
    """Eager's has a gradient after backward."""
    with pytest.warns(
        RuntimeWarning, match=r"returns a tensor of shape \(.*\) that it has made and called requires_grad_"
    ):
        capture(Plain(lambda m, h: (leaf := h.detach().requires_grad_(), leaf.sum())), (X,), {})


def test_a_mapping_whose_attributes_are_its_keys_is_read() -> None:
    class Settings(dict[str, Any]):
        __getattr__ = dict.__getitem__

    model: Any = Plain(lambda m, h: h * m.settings.scale)
    model.settings = Settings(scale=2.0)
    capture(model, (X,), {})


def test_a_property_of_the_compiled_module_is_not_set() -> None:
    model: Any = memgraph.compile(nn.Linear(4, 4), 1 << 30)
    with pytest.raises(AttributeError, match="optimizer is a property of the compiled module itself: set it on the"):
        model.optimizer = None


def test_a_dict_with_tensors_as_keys_is_no_result() -> None:
    with pytest.raises(CaptureError, match="returns a dict with a tensor as a key: return a list of pairs"):
        capture(Plain(lambda m, h: [{h: 1}]), (X,), {})


def test_a_module_that_is_a_part_of_itself_is_refused_by_its_path() -> None:
    """A child that knows its parent by a proxy, which torch takes for a submodule."""
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model[0].parent = weakref.proxy(model)
    with pytest.raises(CaptureError, match=r"submodule 0.parent is a module that it is inside of"):
        memgraph.compile(model, 1 << 30)(torch.ones(2, 4))
