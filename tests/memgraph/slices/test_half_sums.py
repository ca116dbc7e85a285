"""Sums over rows in bfloat16: parts are added up in float32, so that errors do not grow with the number of parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.sliced_models import Blocks, rows
from tests.support.sliced_training import ROOM, assert_kept, batch, headed

# Of eager's error beside float64. Eager rounds a sum once. Here the product of each part is rounded, which errs about as
# much where parts are of either sign, and their sum once more: twice the variance.
FACTOR = 2**0.5


def gradients(model: Any, module: nn.Module, args: Any) -> dict[str, Tensor]:
    """Return the gradients of a step, in float64."""
    torch.manual_seed(1)
    model(*args).backward()
    return {name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None}


def errors(found: dict[str, Tensor], right: dict[str, Tensor], names: Any) -> dict[str, float]:
    return {name: float((found[name] - right[name]).norm() / right[name].norm()) for name in names}


def assert_as_close(module: nn.Module, args: Any, slices: dict[str, int], summed: tuple[str, ...]) -> None:
    """Check that sums of parts are as close to float64 as eager's."""
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    wide = tuple(x.double() if x.is_floating_point() else x for x in args)
    model = memgraph.compile(module, ROOM, slices=slices, offload=None)
    ours = gradients(model, module, args)
    right = gradients(exact, exact, wide)
    found, expected = errors(ours, right, summed), errors(gradients(eager, eager, args), right, summed)
    assert all(found[name] <= FACTOR * expected[name] for name in summed), (found, expected)
    types = {op.name: op.type for op in model.plan.forecast.trace.ops}
    sums = [name for name in types if name.endswith("__sum")]
    assert sums and all(types[name].startswith("f32") for name in sums)
    assert_kept(model)


@pytest.mark.long
@pytest.mark.parametrize("parts", [4, 32, 256])
def test_the_gradients_of_a_head_are_as_close_as_eagers(parts: int) -> None:
    module = headed(bias=True).bfloat16()
    assert_as_close(module, batch(), {"head": parts}, ("head.weight", "head.bias"))


@pytest.mark.long
@pytest.mark.parametrize("parts", [4, 32])
def test_the_gradients_of_an_mlp_are_as_close_as_eagers(parts: int) -> None:
    torch.manual_seed(0)
    module = Blocks().bfloat16()
    names = ("blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.down.weight")
    assert_as_close(module, (rows(2, 64).bfloat16(),), {"blocks.0.up": parts}, names)
