"""Recurrent layers that cuDNN runs are opaque: no trace can show its packed weights, nor its state of dropout."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.capture.constant_fake_mode import ConstantFakeMode
from memgraph.capture.values import host_lengths
from memgraph.errors import CaptureError
from memgraph.opaque import recorder
from memgraph.opaque.refused_dropout import RefusedDropoutError, refuse_hidden_dropout

WIDTH = 16


class Tagger(nn.Module):
    """Two layers of a recurrent net with dropout between them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0]).square().mean()


@pytest.mark.parametrize(
    ("device", "enabled", "expected"), [("cuda:0", True, True), ("cuda:0", False, False), ("cpu", True, False)]
)
def test_cudnn_runs_a_recurrent_layer_on_a_gpu_unless_it_is_disabled(
    device: str, enabled: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_lengths, "_cudnn_is_enabled", lambda: enabled)
    with ConstantFakeMode():
        assert host_lengths._is_cudnns(torch.empty(2, 3, device=device)) is expected


@pytest.mark.long
def test_such_a_layer_runs_as_it_is_beside_ops_that_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_lengths, "_is_cudnns", lambda x: True)
    x, gradients = torch.randn(2, 8, WIDTH), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Tagger()
        called = memgraph.compile(model, "1GB") if compiled else model
        for _ in range(2):
            torch.manual_seed(1)
            called(x).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert isinstance(called, memgraph.CompiledModule) and "body" in str(called.plan)


@pytest.mark.parametrize(
    ("dropout", "layers", "training", "enabled", "refused"),
    [
        (0.2, 2, True, True, True), (0.0, 2, True, True, False), (0.2, 1, True, True, False),
        (0.2, 2, False, True, False), (0.2, 2, True, False, False),
    ],
)  # fmt: skip
def test_a_dropout_that_cudnn_draws_from_a_hidden_state_is_refused(
    dropout: float, layers: int, training: bool, enabled: bool, refused: bool
) -> None:
    part = nn.Sequential(nn.LSTM(WIDTH, WIDTH, num_layers=layers, dropout=dropout)).train(training)
    error = pytest.raises(RefusedDropoutError, match=r"body\.0 \(LSTM\)") if refused else nullcontext()
    with torch.backends.cudnn.flags(enabled=enabled), error:
        refuse_hidden_dropout("body", part, {"cpu", "cuda"})
    refuse_hidden_dropout("body", part, {"cpu"})


def test_no_part_around_such_a_layer_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_lengths, "_is_cudnns", lambda x: True)
    monkeypatch.setattr(
        recorder, "refuse_hidden_dropout", lambda path, part, _: refuse_hidden_dropout(path, part, {"cuda"})
    )
    with pytest.raises(RefusedDropoutError, match=r"body \(LSTM\) has dropout=0\.2 .*nn\.Dropout"):
        memgraph.compile(nn.Sequential(Tagger(), nn.Identity()), "1GB")(torch.randn(2, 8, WIDTH))


def test_without_opaque_parts_the_error_names_the_layer_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_lengths, "_is_cudnns", lambda x: True)
    compiled = memgraph.compile(Tagger(), "1GB", opaque=False)
    with pytest.raises(CaptureError, match=r"in body \(LSTM\): cuDNN packs the weights[\s\S]*opaque=True"):
        compiled(torch.randn(2, 8, WIDTH))
