"""Autograd refuses the same uses of the compiled module as of the plain one, and no others."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memgraph
from passes.schedule.schedule import Placement
from tests.support.faults import ROOM, Net, assert_next_step_right, batch, fresh, step


def test_backward_twice_is_refused_as_in_eager(fate: Placement) -> None:
    module, compiled = fresh()
    loss = compiled(batch()).sum()
    loss.backward()
    with pytest.raises(memgraph.MemgraphError, match=r"retain_graph=True"):
        loss.backward()
    with pytest.raises(memgraph.MemgraphError, match=r"retain_graph=True"):
        torch.autograd.grad(loss, [module.last.weight])
    assert_next_step_right(module, compiled)


class Returning(nn.Module):
    """A net that returns a scalar, and what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.net(x)
        return y.square().mean(), y


@pytest.mark.parametrize("place", [0, 1], ids=["planned", "unplanned"])
@pytest.mark.filterwarnings("ignore:a loss was made of outputs:RuntimeWarning")
def test_a_loss_that_is_kept_after_backward_does_not_keep_the_batch(place: int) -> None:
    for model in (Returning(), memgraph.compile(Returning(), ROOM)):
        x = batch()
        freed = weakref.ref(x)
        loss = model(x)[place].sum()
        loss.backward(retain_graph=True)
        del x
        assert freed() is not None  # for another backward
        loss.backward()
        assert freed() is None
        with pytest.raises(RuntimeError, match=r"retain_graph=True"):
            loss.backward()


@pytest.mark.long
def test_double_backward_is_refused_with_the_reason(fate: Placement) -> None:
    module, compiled = fresh()
    x = batch().requires_grad_()
    with pytest.raises(
        memgraph.MemgraphError, match=r"memgraph module can't be differentiated again \(create_graph=True\)"
    ):
        torch.autograd.grad(compiled(x).sum(), [x], create_graph=True)
    with pytest.raises(memgraph.MemgraphError, match=r"use the plain module"):
        compiled(x).sum().backward(create_graph=True)
    assert_next_step_right(module, compiled)


@pytest.mark.long
@pytest.mark.parametrize("what", ["input", "weight", "bias of a norm"])
def test_what_backward_needs_may_not_be_changed_before_it(fate: Placement, what: str) -> None:
    module, compiled = fresh()
    for model in (module, compiled):
        x = batch()
        loss = model(x).square().mean()
        changed = {"input": x, "weight": module.last.weight, "bias of a norm": module.blocks[0][1].weight}[what]  # type: ignore[index]
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()
    assert_next_step_right(module, compiled)


def test_an_optimizer_may_not_step_between_forward_and_backward(fate: Placement) -> None:
    module, compiled = fresh()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step(compiled)
    loss = compiled(batch()).square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified in ?place"):
        loss.backward()
    assert_next_step_right(module, compiled)


def test_what_backward_does_not_need_may_be_changed_before_it() -> None:
    module, compiled = fresh()
    found = []
    for model in (module, compiled):
        module.load_state_dict(fresh()[0].state_dict())
        model.zero_grad()
        torch.manual_seed(7)
        loss = model(batch()).square().mean()
        with torch.no_grad():
            module.last.bias.zero_()
        loss.backward()
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("make", [lambda h: h.sigmoid(), lambda h: h.sigmoid().view(-1), lambda h: h.sigmoid()[:, :4]])
def test_an_output_that_backward_needs_may_not_be_changed_before_it(make: Callable[[Tensor], Tensor]) -> None:
    class Out(Net):
        def forward(self, x: Tensor) -> Tensor:
            return make(super().forward(x))

    module = Out()
    for model in (module, memgraph.compile(module, ROOM)):
        out = model(batch())
        with torch.no_grad():
            out.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            out.sum().backward()


def test_what_backward_needs_may_not_be_changed_before_it_if_the_loss_is_of_other_outputs() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.net(x).sin()
            return h.sum(), h

    module = Both()
    result = memgraph.compile(module, ROOM)(batch())
    with torch.no_grad():
        module.net.last.weight.mul_(2)
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="modified"):
        result[1].sum().backward()


def test_a_leaf_that_requires_a_gradient_may_not_be_changed_by_forward() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True))
    for model in (module, memgraph.compile(module, ROOM)):
        with pytest.raises(RuntimeError, match=r"a leaf [Vv]ariable|in place a leaf .*\n.*inplace=False"):
            model(batch().requires_grad_())
