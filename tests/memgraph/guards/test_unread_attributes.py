"""An attribute that the training loop sets and no code of forward reads is no fact of a call."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tail = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.losses: list[Any] = []
        self.notes: dict[str, Any] = {}
        self.epoch, self.scale = 0, 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.layer(x)) * self.scale


class Looping(Net):
    """Reads attributes by names that it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(vars(self)[name] for name in ("epoch",))


class Branching(Net):
    """Reads one in some calls alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.epoch if self.scale > 2 else 0)


def note(net: Any, step: int, loss: Tensor) -> None:
    net.epoch = step
    net.losses.append(loss.detach() if step % 2 else loss.item())
    net.notes[f"step {step}"] = step
    net.tail[0].seen = step


def doubled(net: Any, step: int, loss: Tensor) -> None:
    note(net, step, loss)
    net.scale = 3.0 if step == 3 else net.scale


def replaced(net: Any, step: int, loss: Tensor) -> None:
    """Torch calls `forward`, and hooks of torch's may read `training`."""
    note(net, step, loss)
    layer = net.tail[0]
    factor = 1.0 + step // 3
    if step % 3 == 0:
        layer.forward = lambda x: nn.functional.linear(x, layer.weight) * factor


def evaluated(net: Any, step: int, loss: Tensor) -> None:
    note(net, step, loss)
    net.train(step % 3 != 2)


def trained(make: Callable[[], nn.Module], change: Any, compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = make()
    model, found = memgraph.compile(net, "1GB") if compiled else net, []
    torch.manual_seed(1)
    for step in range(8):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
        net.zero_grad()
        change(net, step, loss)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "change", "captures"),
    [
        (Net, note, 1),
        (Net, doubled, 2),
        (Net, replaced, 4),
        (Net, evaluated, 2),
        (Looping, note, 8),
        (Branching, doubled, 8),
    ],
)
def test_steps_are_eagers_and_captured_where_what_is_read_differs(
    make: Callable[[], nn.Module], change: Any, captures: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "memgraph"):
        ours = trained(make, change, compiled=True)
    assert all(map(torch.equal, ours, trained(make, change, compiled=False)))
    assert sum("is captured, priced and planned" in record.getMessage() for record in caplog.records) <= captures


def test_with_a_loss_what_forward_reads_counts_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """A proxy stands around the module then, and reads it in code of this package."""
    torch.manual_seed(0)
    plain = Net().eval()
    net = copy.deepcopy(plain)
    model = memgraph.compile(net, "1GB", loss=lambda out: out.square().mean())
    with caplog.at_level(logging.INFO, "memgraph"):
        for step in range(6):
            ours, theirs = model(torch.ones(2, 4)), plain(torch.ones(2, 4)).square().mean()
            assert torch.equal(ours, theirs)
            for each in (plain, net):
                doubled(each, step, theirs)
    assert sum("is captured, priced and planned" in record.getMessage() for record in caplog.records) == 2
    for each in (plain, net):
        torch.manual_seed(1)
        each.tail.append(nn.Linear(4, 4))
    assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)).square().mean())


def test_a_layer_that_takes_the_place_of_another_counts_with_what_is_read_of_it() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.1))
    plain = copy.deepcopy(net)
    model = memgraph.compile(net, "1GB")
    for slope in (0.1, 0.5, 0.9):
        net[1], plain[1] = nn.LeakyReLU(slope), nn.LeakyReLU(slope)
        assert torch.equal(model(-torch.ones(2, 4)), plain(-torch.ones(2, 4)))


def test_an_attribute_that_is_read_later_counts_again() -> None:
    torch.manual_seed(0)
    plain: Any = Branching()
    net = copy.deepcopy(plain)
    model = memgraph.compile(net, "1GB")
    for step in range(9):
        plain.epoch = net.epoch = step
        plain.scale = net.scale = 2.0 if step in (0, 1, 2, 6, 7) else 3.0
        torch.manual_seed(step)
        ours = model(torch.ones(2, 4))
        torch.manual_seed(step)
        assert torch.equal(ours, plain(torch.ones(2, 4)))


class Counting(Net):
    """Counts the rows that it is trained on."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.epoch += len(x)
        return super().forward(x)


def test_a_number_that_one_kind_of_call_counts_is_no_fact_of_another(caplog: pytest.LogCaptureFixture) -> None:
    net, plain = Counting(), Counting()
    plain.load_state_dict(net.state_dict())
    model = memgraph.compile(net, "1GB")
    with caplog.at_level(logging.INFO, "memgraph"):
        for _ in range(4):
            for mode in (True, False):
                torch.manual_seed(0)
                found = model.train(mode)(torch.ones(2, 4))
                torch.manual_seed(0)
                assert torch.equal(found, plain.train(mode)(torch.ones(2, 4)))
    assert sum("captured" in record.message for record in caplog.records) == 2
    assert net.epoch == plain.epoch == 8


def test_the_warning_of_ever_more_captures_names_the_attribute() -> None:
    net = Net()
    model = memgraph.compile(net, "1GB", time_limit=0)
    with pytest.warns(
        RuntimeWarning, match=r"calls with equal arguments were each captured.*: notes differs each time"
    ):
        net.forward = lambda x: net.layer(x) * len(net.notes)  # type: ignore[method-assign]
        for step in range(9):
            net.notes[f"step {step}"] = step
            model(torch.ones(2, 4))
