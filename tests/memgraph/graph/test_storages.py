"""A value's bytes are those of its storage, as the kernel allocates it, whatever the process has traced before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import memgraph
from memgraph.capture import constant_fake_mode
from memgraph.capture.capture import capture
from memgraph.capture.constant_fake_mode import ConstantFakeMode
from memgraph.graph.aten_shims import COPY_STORAGES
from memgraph.graph.nodes import tensors
from memgraph.graph.result_layout import ResultLayout, layout_in_storage
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from tests.support.models import Function

X = torch.randn(200, 8, generator=torch.Generator().manual_seed(5))
aten = torch.ops.aten


def written(linear: nn.Module, x: Tensor) -> Tensor:
    h = linear(x)
    wide = h.new_empty(len(h), 4, 8)
    for i in range(4):
        wide[:, i] = h * i
    return wide.square()


def halves(linear: nn.Module, x: Tensor) -> Tensor:
    h = linear(x).view(-1, 2, 4)
    h[:, :, 3] *= 2.0
    h[..., 1::2].add_(1)
    return h.cos()


def spectrum(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.fft.rfft(linear(x).flatten()).abs()


def heard(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(linear(linear(x).sin()).cos()), n=8)


def spectrogram(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.stft(linear(x).flatten(), 64, 16, window=torch.hann_window(64), return_complex=True).abs()


def distance(linear: nn.Module, x: Tensor) -> Tensor:
    h = linear(x)
    return F.mse_loss(h, x) * h.exp()  # its kernel leaves the scalar in the storage of all the squares


STEPS = [written, halves, spectrum, heard, spectrogram, distance]


@pytest.mark.long
@pytest.mark.parametrize("function", STEPS)
def test_every_compile_forecasts_the_same_and_to_the_byte(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    budget, peaks = 10**9, set[int]()
    for _ in range(3):
        model = Function(function)
        compiled = memgraph.compile(model, budget, time_limit=0)
        tangent = torch.ones_like(model(X))
        compiled(X).backward(tangent)
        model.zero_grad()
        there = resident_bytes([*model.parameters(), X, tangent])
        _, allocated = measure_peak(lambda compiled=compiled, tangent=tangent: compiled(X).backward(tangent))  # type: ignore[misc]
        assert allocated is not None
        assert there + allocated.peak == compiled.plan.measured == compiled.plan.peak <= budget
        budget = compiled.plan.peak
        peaks.add(budget)
    assert len(peaks) == 1


@pytest.mark.parametrize("function", STEPS)
def test_a_step_that_was_captured_before_is_captured_alike(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    def captured() -> list[tuple[str, list[ResultLayout]]]:
        graph = capture(Function(function), (X,), {}).graph.graph
        return [(node.name, list(map(layout_in_storage, tensors(node)))) for node in graph.nodes if node.op != "output"]

    assert captured() == captured()


@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x[:4], lambda x: x[:, 3:9], lambda x: x[:, 1::2], lambda x: x.t(), lambda x: x[:0]]
)
@pytest.mark.parametrize(
    "write",
    [
        lambda x: aten.copy(x, torch.ones(x.shape)),
        lambda x: aten.slice_scatter(x, x[:, :2] + 1, 1, 0, 2),
        lambda x: aten.select_scatter(x, x[:, 0] + 1, 1, 0),
        lambda x: aten.diagonal_scatter(x, x.diagonal() + 1),
        lambda x: aten.as_strided_scatter(x, torch.ones(2, 0), (2, 0), (20, 1)),
    ],
)
def test_a_write_into_a_view_is_foretold_as_the_kernel_does_it(
    view: Callable[[Tensor], Tensor], write: Callable[[Tensor], Tensor]
) -> None:
    real = layout_in_storage(write(view(torch.zeros(10, 20))))
    for _ in range(2):  # torch remembers the second one
        with ConstantFakeMode():
            assert layout_in_storage(write(view(torch.zeros(10, 20)))) == real


@pytest.mark.parametrize("make", [torch.hann_window, torch.bartlett_window, torch.blackman_window])
def test_a_result_in_a_larger_storage_has_the_same_bytes_whatever_was_traced_before(
    make: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constant_fake_mode, "_measured", set())
    monkeypatch.setattr(constant_fake_mode, "_large", set(COPY_STORAGES))
    real = layout_in_storage(make(8))
    for mode in (
        FakeTensorMode,
        FakeTensorMode,
        ConstantFakeMode,
        ConstantFakeMode,
    ):  # torch remembers what the second one makes
        with mode():
            found = layout_in_storage(make(8))
    assert found == real
