"""A child of fork trains what its parent has compiled, at the same time, and neither finds anything of the other's."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support import faults
from tests.support.forks import forked
from tests.support.streamed_state import Twins, far, loss


def made(model: nn.Module, times: float) -> Tensor:
    """The loss of a batch that is `times` the usual one, with the same random numbers."""
    torch.manual_seed(7)
    return loss(model(faults.batch() * times))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def agree(module: nn.Module, ours: Tensor, times: float) -> bool:
    """Return True if backward has the gradients of a plain copy."""
    plain = copy.deepcopy(module)
    plain.zero_grad()
    made(plain, times).backward()
    module.zero_grad()
    ours.backward()
    return bool(gradients(plain)) and all(map(torch.equal, gradients(module), gradients(plain)))


ROOT = Path(__file__).parents[2]
FIRST = """
import torch, memgraph
from tests.support.forks import forked
model = memgraph.compile(torch.nn.Linear(4, 4), "1GB")
def step():
    model(torch.ones(2, 4)).sum().backward()
step()
raise SystemExit(forked(step).code())
"""


@pytest.mark.usefixtures("spilling")
def test_both_have_a_step_in_flight_at_the_same_time() -> None:
    module, compiled = faults.fresh()
    assert agree(module, made(compiled, 1), 1)
    (to_parent, childs), (to_child, parents) = os.pipe(), os.pipe()

    def work() -> bool:
        ours = made(compiled, 2)
        os.write(childs, b"x")
        os.read(to_child, 1)
        return agree(module, ours, 2)

    child = forked(work)
    os.close(childs)
    os.read(to_parent, 1)
    ours = made(compiled, 1)
    os.write(parents, b"x")
    assert child.code() == 0
    assert agree(module, ours, 1)
    for end in (to_parent, to_child, parents):
        os.close(end)


@pytest.mark.usefixtures("spilling")
def test_a_child_does_not_go_on_with_what_its_parent_has_begun() -> None:
    module, compiled = faults.fresh()
    assert agree(module, made(compiled, 1), 1)
    ours = made(compiled, 1)

    def work() -> bool:
        with pytest.raises(memgraph.SpillError, match="before the process was forked"):
            ours.backward()
        return agree(module, made(compiled, 2), 2)

    assert forked(work).code() == 0
    assert agree(module, ours, 1)


@pytest.mark.long
def test_what_lives_far_is_trained_apart() -> None:
    twins = Twins()
    twins.train(2)

    def work() -> bool:
        twins.train(1)
        with torch.no_grad():
            for parameter in twins.module.parameters():
                parameter.zero_()
        return far(twins.module, twins.ours) >= {"parameter", "state"}

    assert forked(work).code() == 0
    twins.assert_same()
    twins.train(1)


@pytest.mark.long
def test_a_child_trains_though_its_parent_was_on_fake_tensors_before_its_first_backward() -> None:
    """A CUDA build of torch believes in a device from then on, where there is none."""
    ran = subprocess.run([sys.executable, "-c", FIRST], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
