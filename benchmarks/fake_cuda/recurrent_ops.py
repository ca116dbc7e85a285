"""CUDA's recurrent layers, on tensors of the host.

_cudnn_rnn(x, weights, ...)            ->   torch.lstm(x, ...), and the state behind the last position
_cudnn_rnn_backward(x, ..., gradient)  ->   the same forward again, differentiated by autograd

_thnn_fused_lstm_cell(gates, ...)      ->   the new state, and the gates for backward

What dropout between cuDNN's layers draws follows the device's generator here, and a state of its own there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .host_draws import drawing, next_seed

MODES = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)  # by cuDNN's numbers
LSTM = 2


@dataclass(frozen=True)
class Recurrent:
    """A stack of layers over [positions, batch, width], or over the rows of a packed sequence."""

    weights: Sequence[Tensor]
    weights_of_layer: int
    mode: int
    layers: int
    batch_first: bool
    dropout: float
    seed: int  # of what dropout draws
    trains: bool
    bidirectional: bool
    batch_sizes: Sequence[int]

    def __call__(self, x: Tensor, hidden: Tensor, cell: Tensor | None) -> tuple[Tensor, ...]:
        """Return the output, and the last state of each layer: hidden, and cell of an LSTM."""
        state = (hidden, cell) if self.mode == LSTM else hidden
        layers = (
            list(self.weights),
            self.weights_of_layer > 2,
            self.layers,
            self.dropout,
            self.trains,
            self.bidirectional,
        )
        run: Callable[..., tuple[Tensor, ...]] = MODES[self.mode]
        with drawing(self.seed):
            if self.batch_sizes:
                return run(x, torch.tensor(self.batch_sizes), state, *layers)
            return run(x, state, *layers, self.batch_first)


def forward(
    x: Tensor, weights: Sequence[Tensor], of_layer: int, flat: Tensor | None, hidden: Tensor, cell: Tensor | None,
    mode: int, width: int, projected: int, layers: int, batch_first: bool, dropout: float, trains: bool,
    bidirectional: bool, batch_sizes: Sequence[int], draws: Tensor | None,
) -> Sequence[Tensor]:  # fmt: skip
    seed = next_seed() if dropout and trains else 0
    run = Recurrent(weights, of_layer, mode, layers, batch_first, dropout, seed, trains, bidirectional, batch_sizes)
    output, *state = (each.detach() for each in _outside(lambda: run(x, hidden, cell)))
    reserve = torch.tensor([seed]).view(torch.uint8)
    flat = flat_weights(weights) if flat is None else flat
    return output, state[0], state[1] if mode == LSTM else torch.empty(0), reserve, flat


def backward(
    x: Tensor, weights: Sequence[Tensor], of_layer: int, flat: Tensor, hidden: Tensor, cell: Tensor | None,
    output: Tensor, of_output: Tensor | None, of_hidden: Tensor | None, of_cell: Tensor | None, mode: int, width: int,
    projected: int, layers: int, batch_first: bool, dropout: float, trains: bool, bidirectional: bool,
    batch_sizes: Sequence[int], draws: Tensor | None, reserve: Tensor, wanted: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    facts = batch_first, dropout, int(reserve.view(torch.int64)), trains, bidirectional, batch_sizes

    def run() -> list[Tensor | None]:
        x_, hidden_, *weights_ = (each.detach().requires_grad_() for each in (x, hidden, *weights))
        cell_ = None if cell is None else cell.detach().requires_grad_()
        again = Recurrent(weights_, of_layer, mode, layers, *facts)
        given = zip(again(x_, hidden_, cell_), (of_output, of_hidden, of_cell), strict=False)
        pairs = [(result, gradient) for result, gradient in given if gradient is not None]
        inputs = [x_, hidden_, *([] if cell_ is None else [cell_]), *weights_]
        results, gradients = zip(*pairs, strict=True)
        return list(torch.autograd.grad(results, inputs, gradients, allow_unused=True))

    of_x, of_first, *rest = _outside(run)
    of_first_cell = None if cell is None else rest.pop(0)
    of_weights = [torch.zeros_like(each) if found is None else found for each, found in zip(weights, rest, strict=True)]
    return of_x, of_first, of_first_cell, of_weights if wanted[3] else []


def flat_weights(weights: Sequence[Tensor], *args: Any) -> Tensor:
    """Return the weights of recurrent layers as one tensor; here they stay tensors of their own."""
    return torch.cat([weight.reshape(-1) for weight in weights])


def dropout_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _outside(run: Callable[[], Any]) -> Any:
    """Call a function where autograd works, which it does not within a kernel."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def cell(
    of_input: Tensor, of_hidden: Tensor, before: Tensor, bias: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden state and the cell of an LSTM, and its four gates."""
    gates = of_input + of_hidden + (0 if bias is None else bias) + (0 if other is None else other)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * before + i * g
    return o * after.tanh(), after, torch.cat((i, f, g, o), 1)


def cell_backward(
    of_hidden: Tensor | None, of_after: Tensor | None, before: Tensor, after: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = gates.chunk(4, 1)
    bent = after.tanh()
    hidden = torch.zeros_like(after) if of_hidden is None else of_hidden
    of_cell = hidden * o * (1 - bent * bent) + (0 if of_after is None else of_after)
    gradients = (
        of_cell * g * i * (1 - i),
        of_cell * before * f * (1 - f),
        of_cell * i * (1 - g * g),
        hidden * bent * o * (1 - o),
    )
    joined = torch.cat(gradients, 1)
    return joined, of_cell * f, joined.sum(0) if has_bias else None
