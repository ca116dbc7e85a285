"""A trace asks for the same values as the real run before it, and modules are what they are in eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.graph.provenance import CALLERS
from tests.support.compare import assert_alike, steps


class NamedExperts(nn.Module):
    """Calls the expert of the number that a tensor holds, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(8, 8) for i in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[0, 0] * 10).long().abs() % 3
        return self.experts[f"expert_{chosen}"](x)


class Routed(nn.Module):
    """Reads one value, and has classes checked that a trace does not ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        classes = F.one_hot(y.argmax(-1), num_classes=8)
        return y * classes if bool(classes.sum() > 0) else y


class Told(nn.Module):
    """Prints a tensor into a text that decides nothing, and reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        assert repr(y)
        return y if bool(y.isfinite().all()) else y * 2


class Converted(nn.Module):
    """Converts a part to the dtype that it has, and keeps a place for a part that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.parts = nn.ModuleList([nn.BatchNorm1d(8), None])  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Tensor:
        self.body = self.body.to(x.dtype)
        return self.parts[0](self.body(x))


class LogSigmoid(nn.Module):
    """Binary cross entropy of logits, whose op gives a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.body(x), (x > 0).to(x.dtype))


@pytest.mark.long
@pytest.mark.parametrize("make", [LogSigmoid, NamedExperts, Routed, Told, Converted])
def test_it_trains_as_in_eager(make: type[nn.Module]) -> None:
    assert_alike(steps, make)


def test_another_number_in_a_name_is_another_branch() -> None:
    torch.manual_seed(0)
    module = NamedExperts()
    model, x = memgraph.compile(module, "1GB"), torch.zeros(2, 8)
    for number in (1, 2, 1):
        x[0, 0] = number / 10 + 0.05
        model(x).sum().backward()
        used = [name for name, part in module.experts.items() if part.weight.grad is not None]
        assert used == [f"expert_{number}"]
        module.zero_grad()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def packed() -> nn.utils.rnn.PackedSequence:
    return nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 8), torch.tensor([3, 2]), batch_first=True)


@pytest.mark.parametrize(
    "make, call",
    [
        (encoder, lambda model: model(torch.ones(2, 3, 8), mask=nn.Transformer.generate_square_subsequent_mask(3))),
        (lambda: nn.GRU(8, 4, batch_first=True), lambda model: model(packed())[1]),
        (
            lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 10, [3]),
            lambda model: model(torch.ones(4, 8), torch.tensor([0, 9, 2, 5])).loss,
        ),
    ],
)
def test_modules_of_torch_read_values_where_no_code_of_the_users_runs(make: Any, call: Any) -> None:
    assert_alike(lambda model: (call(model).square().sum().backward(), ())[1], make)


def test_the_files_that_call_a_module_are_where_a_line_is_looked_for() -> None:
    assert all(Path(memgraph.__file__).parent.joinpath(file).exists() for file in CALLERS)
