"""A loss of outputs without a planned backward gets eager's gradients, or is refused if forward can't run again."""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.compare import ROOM, assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:a loss was made of outputs:RuntimeWarning")
SCALE = contextvars.ContextVar("SCALE", default=1.0)
FILE = {"scale": 1.0}


class Net(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.rate = nn.Linear(8, 8), nn.Dropout(0.5), 1.0
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.drop(self.body(x)) * self.rate * SCALE.get() * FILE["scale"] * self.scale
        return y, y.abs().mean()


def of_both(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return outputs[0].square().mean() + outputs[1]


def triple(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 3


CHANGES: dict[str, tuple[Callable[[Net, Tensor], object], str]] = {
    "an attribute": (lambda net, x: setattr(net, "rate", 2.0), r"rate is 2\.0, and was 1\.0"),
    "a variable": (lambda net, x: FILE.update(scale=2.0), r"scale is 2\.0, and was 1\.0"),
    "a context variable": (lambda net, x: SCALE.set(2.0), r"SCALE is 2\.0, and was"),
    "eval": (lambda net, x: net.eval(), r"drop\.training is False, and was True"),
    "a hook": (lambda net, x: net.body.register_forward_hook(triple), "body has changed"),
    "a buffer": (lambda net, x: net.scale.mul_(2), "modified since"),
    "data": (lambda net, x: setattr(net.body.bias, "data", net.body.bias.data + 1), "modified since"),
    "an argument": (lambda net, x: x.zero_(), "modified since"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_between_forward_and_backward_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILE, "scale", 1.0)
    torch.manual_seed(0)
    net = Net()
    model, (change, message) = memgraph.compile(net, ROOM), CHANGES[what]

    def run() -> None:
        outputs = model(x := torch.randn(4, 8))
        change(net, x)
        with pytest.raises(memgraph.MemgraphError, match=message):
            of_both(outputs).backward()

    contextvars.copy_context().run(run)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_step_that_was_refused_is_right_if_it_is_run_again() -> None:
    torch.manual_seed(0)
    plain = Net()
    model = memgraph.compile(ours := copy.deepcopy(plain), ROOM)
    with pytest.raises(memgraph.MemgraphError, match="run this step again"):
        outputs = model(torch.randn(4, 8))
        ours.rate = 2.0
        of_both(outputs).backward()
    x = torch.randn(4, 8)
    pairs: list[tuple[Any, Net]] = [(plain, plain), (model, ours)]
    for each, net in pairs:
        torch.manual_seed(1)
        net.rate = 3.0
        outputs = each(x)
        net.rate = 1.0
        of_both(outputs).backward()
    assert_equal([p.grad for p in plain.parameters()], [p.grad for p in ours.parameters()])


class FirstCall(nn.Module):
    """Its first call takes values from the batch, as a codebook does, and each call moves them."""

    scale: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.calls == 0:
            self.scale.copy_(x.std(0))
            self.calls.add_(1)
        y = self.body(x) * self.scale.clone()
        self.scale.mul_(0.9)
        return y, y.abs().mean()


def test_a_buffer_that_decides_a_branch_is_what_it_was() -> None:
    torch.manual_seed(0)
    plain = FirstCall()
    model = memgraph.compile(ours := copy.deepcopy(plain), ROOM)
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        for each in (plain, model):
            each.zero_grad()
            of_both(each(x)).backward()
        assert_equal([p.grad for p in plain.parameters()], [p.grad for p in ours.parameters()])
        assert_equal([*plain.buffers()], [*ours.buffers()])
