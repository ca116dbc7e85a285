"""A write into part of a value becomes a new value without a second trace, with eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.capture import functionalize
from memgraph.capture.capture import capture
from tests.memgraph.capture.test_inplace_parts import assert_as_eager
from tests.support.captured_calls import assert_well_formed


class Writing(nn.Module):
    """Two layers, and between them what is written to."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.write = nn.Linear(6, 6), nn.Linear(6, 6), write

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.write(self.first(x), x)).square().mean()


def shifted(h: Tensor, x: Tensor) -> Tensor:
    shifted = torch.zeros_like(h)
    shifted[:, 1:] = h[:, :-1].clone()
    shifted[:, 0] = 2.0
    return shifted


def steps_of_a_loop(h: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros(4, 6)
    for i in range(4):
        out[i] = h[i] * (i + 1) + out[i - 1]
    return out


def views_made_before(h: Tensor, x: Tensor) -> Tensor:
    y = h * 2
    flat, turned = y.view(-1), y.t()
    y[1:3] += x[1:3]
    return y + flat.view(4, 6) + turned.t().tanh()


def views_of_views(h: Tensor, x: Tensor) -> Tensor:
    y = h * 2
    part = y.view(2, 2, 6).transpose(0, 1)[1].unsqueeze(0)
    part.mul_(3.0)
    return y + part.sum()


def whole(h: Tensor, x: Tensor) -> Tensor:
    y = h * 2
    turned = y.permute(1, 0)
    y.mul_(3.0)
    turned[0].add_(1.0)
    return y * turned.t()


def diagonal(h: Tensor, x: Tensor) -> Tensor:
    y = h * 2
    y.diagonal().zero_()
    return y


def sizes(h: Tensor, x: Tensor) -> Tensor:
    y = (h * 2).t_().t_()
    return y + (h * 3).unsqueeze_(0).squeeze_(0)


def twice(h: Tensor, x: Tensor) -> Tensor:
    y = h.clone()
    part = y[:2]
    part.mul_(x[:2])
    y.sub_(1.0)
    part[:, 0] = y[2:, 0]
    return y + part.sum() * y[0]


def in_backward(h: Tensor, x: Tensor) -> Tensor:
    return h[:, 1:].expand(2, 4, 5).sum(0).new_zeros(4, 6) + h


WRITES = [shifted, steps_of_a_loop, views_made_before, views_of_views, whole, diagonal, sizes, twice, in_backward]


@pytest.mark.long
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_into_a_part_needs_no_second_trace(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Writing(write), torch.randn(4, 6)
    with mock.patch.object(functionalize, "make_fx", side_effect=AssertionError("traced a second time")):
        graph = capture(model, (x,), {}).graph.graph
    assert_well_formed(graph)
    assert_as_eager(model, x)


def noise_in_rows(h: Tensor, x: Tensor) -> Tensor:
    noise = torch.zeros(4, 64)
    noise[1:3].normal_()
    noise[0].bernoulli_(0.5)
    noise.view(2, 2, 64).transpose(0, 1).uniform_()
    return h + noise.sum(1, keepdim=True)


def overlapping(h: Tensor, x: Tensor) -> Tensor:
    y = h * 2
    y.as_strided((2, 6), (6, 1)).add_(1.0)
    return y


@pytest.mark.parametrize("write", [noise_in_rows, overlapping], ids=lambda write: write.__name__)
def test_what_is_written_is_eagers(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = Writing(write), torch.randn(4, 6)
    compiled = memgraph.compile(model, "1GB")
    for seed in (5, 6):
        torch.manual_seed(seed)
        ours = compiled(x)
        torch.manual_seed(seed)
        assert torch.equal(ours, model(x))


@pytest.mark.parametrize("method", ["normal_", "uniform_", "bernoulli_"])
def test_draws_into_elements_that_are_not_adjacent_are_refused(method: str) -> None:
    """The kernel would draw in another order into a new tensor."""

    def write(h: Tensor, x: Tensor) -> Tensor:
        noise = torch.zeros(4, 64)
        getattr(noise[:, ::2], method)()
        return h + noise.sum(1, keepdim=True)

    with pytest.raises(memgraph.CaptureError, match="not adjacent"):
        memgraph.compile(Writing(write), "1GB")(torch.randn(4, 6))
