"""Recurrent layers that torch makes of many ops are one op each: eager's bits, under the forecast, in any budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import memgraph
from memgraph.graph.recurrent.layer_ops import FORWARD, described
from memgraph.graph.recurrent.saved_graph import Layer
from memgraph.graph.result_layout import layout
from memgraph.system.trial_room import ops_within

ROOMY = 1 << 30
ROWS, STEPS, WIDTH = 16, 12, 16
LENGTHS = torch.tensor([12] * 8 + [9, 9, 5, 5, 5, 3, 1, 1])


class Tagger(nn.Module):
    """Embeds, runs recurrent layers, and adds what they read where it `skips`; `again` runs them twice."""

    def __init__(
        self, kind: Callable[..., nn.RNNBase], packs: bool = False, skips: bool = False, again: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.packs, self.skips, self.again = packs, skips, again
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), kind(WIDTH, WIDTH, **options)
        ends = 2 if options.get("bidirectional") else 1
        self.start = nn.Parameter(torch.randn(ends * self.layers.num_layers, ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        first = self.layers.batch_first
        given = pack_padded_sequence(x, LENGTHS, first) if self.packs else x
        start = (self.start, self.start * 2) if isinstance(self.layers, nn.LSTM) else self.start
        y, end = self.layers(given, start)
        y = pad_packed_sequence(y, first)[0] if self.packs else y
        y = torch.cat([x] * (y.shape[-1] // WIDTH), -1) + y if self.skips else y
        y = self.layers(y[..., :WIDTH])[0] if self.again else y
        last = end[1] if isinstance(end, tuple) else end
        loss: Tensor = y.square().mean() + last.sum()
        return loss


def whole_layers(compiled: Any) -> int:
    return sum(op.fn == str(FORWARD) for op in compiled.plan.forecast.trace.ops)


def trained_as_eager(model: Tagger, budget: int, steps: int = 3, **options: Any) -> Any:
    """Train beside eager, accumulating gradients in every second step; return the compiled module."""
    plain, ours = copy.deepcopy(model), memgraph.compile(model, budget, **options)
    shape = (ROWS, STEPS, WIDTH) if model.layers.batch_first else (STEPS, ROWS, WIDTH)
    for step in range(steps):
        x, losses = torch.randn(shape), []
        for module in (ours, plain):
            torch.manual_seed(step)
            losses.append(module(x))
            losses[-1].backward()
        assert torch.equal(*losses)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            assert torch.equal(a.grad, b.grad) and a.grad.stride() == b.grad.stride()
        assert ours.plan.measured is None or ours.plan.measured <= ours.plan.peak <= budget
        if step % 2:
            for module in (model, plain):
                module.zero_grad()
    return ours


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "options", "layers"),
    [
        (nn.GRU, {"batch_first": True}, 1),
        (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}, 2),
        (nn.GRU, {"num_layers": 2, "bidirectional": True, "dropout": 0.3, "batch_first": True}, 0),  # draws between
        (nn.RNN, {"nonlinearity": "relu", "bias": False, "bidirectional": True}, 1),
        (nn.LSTM, {"packs": True, "num_layers": 2, "bidirectional": True}, 2),
    ],
)
def test_each_layer_is_one_op_with_eagers_bits(
    kind: Callable[..., nn.RNNBase], options: dict[str, Any], layers: int
) -> None:
    ours = trained_as_eager(Tagger(kind, **options), ROOMY)
    assert whole_layers(ours) == layers and ours.plan.opaque == ()


@pytest.mark.long
def test_gradients_that_come_before_those_of_a_layer_are_added_in_eagers_order() -> None:
    skips = Tagger(nn.GRU, skips=True, bidirectional=True)
    assert whole_layers(trained_as_eager(skips, ROOMY)) == 0
    assert whole_layers(trained_as_eager(Tagger(nn.GRU, again=True), ROOMY)) == 0
    assert whole_layers(trained_as_eager(Tagger(nn.GRU, skips=True), ROOMY)) == 1  # one direction reads its input once


@pytest.mark.long
def test_a_layer_runs_again_where_its_steps_are_too_many_bytes() -> None:
    model = Tagger(nn.GRU, num_layers=3)
    roomy = trained_as_eager(copy.deepcopy(model), ROOMY).plan.peak
    ours = trained_as_eager(model, int(0.7 * roomy), offload=None)
    assert whole_layers(ours) > 3


@pytest.mark.long
def test_layers_are_the_ops_of_their_steps_where_no_plan_fits_otherwise() -> None:
    model = Tagger(nn.GRU)
    whole = trained_as_eager(copy.deepcopy(model), ROOMY).plan.peak
    ours = trained_as_eager(model, int(0.85 * whole), offload=None, accumulate=True)
    assert whole_layers(ours) == 0


def test_backward_runs_again_with_retain_graph() -> None:
    model = Tagger(nn.GRU)
    loss = memgraph.compile(model, ROOMY)(torch.randn(STEPS, ROWS, WIDTH))
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    loss.backward()
    twice = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.equal(grad, 2 * before) for grad, before in zip(twice, once, strict=True))


def gru(trained: tuple[int, ...]) -> tuple[Layer, list[Tensor]]:
    tensors = [torch.randn(STEPS, ROWS, WIDTH), torch.zeros(1, ROWS, WIDTH)]
    weights = [torch.randn(3 * WIDTH, WIDTH), torch.randn(3 * WIDTH, WIDTH), torch.randn(3 * WIDTH)]
    return Layer("gru", (), True, True, False, trained), [*tensors, *weights, torch.randn(3 * WIDTH)]


def test_autograds_nodes_hold_no_bytes() -> None:
    layer, tensors = gru((0, 2, 3, 4, 5))
    values = FORWARD(tensors, *layer)
    ticket = values.pop()
    freed = [StorageWeakRef(x.untyped_storage()) for x in (*tensors, *values)]
    del tensors, values
    assert all(storage.expired() for storage in freed) and ticket.numel() == 0


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_a_layer_is_described_as_it_runs_with_and_without_room_to_try_it(room: int) -> None:
    layer, tensors = gru((0, 2, 3, 4))  # another description than in other tests
    with ops_within(room):
        known = described(layer._replace(train=bool(room)), tensors)
    assert tuple(map(layout, FORWARD(tensors, *layer)[:-1])) == (*known.results, *known.saved)
