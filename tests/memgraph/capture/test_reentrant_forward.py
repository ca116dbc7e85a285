"""No step copies values that forward overwrites: a second forward does not need them, or never runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.capture.capture import capture
from memgraph.capture.reentrant_forward import can_run_again, overwritten_buffers
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.tensors.loss_outputs import select_losses
from tests.support.compare import ROOM, Fact, assert_alike, batch

Change = Callable[[Tensor, Tensor], Tensor]  # of what the layer makes and the buffer: what is returned


class Buffered(nn.Module):
    """A layer, a change of a buffer, and a loss beside what it was made of."""

    kept: Tensor

    def __init__(self, change: Change, shape: tuple[int, ...] = (8,)) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(8, 8), change
        self.register_buffer("kept", torch.linspace(0, 1, shape[-1]).expand(shape).clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.change(self.linear(x), self.kept)
        return y.square().mean(), y


class Normed(nn.Module):
    """A norm that keeps running statistics, and a loss beside what it made."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), norm()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.linear(x))
        return y.square().mean(), y


def followed(y: Tensor, kept: Tensor) -> Tensor:
    with torch.no_grad():
        kept.lerp_(y.mean(0), 0.1)
    return y


def centred(y: Tensor, kept: Tensor) -> Tensor:
    y = y - kept
    with torch.no_grad():
        kept.lerp_(y.mean(0), 0.1)
    return y


def replaced(y: Tensor, kept: Tensor) -> Tensor:
    with torch.no_grad():
        kept.copy_(y.mean(0))
    return y + kept


class Scaled(torch.autograd.Function):
    """Its backward reads what no forward shows."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, by: Tensor) -> Tensor:
        ctx.by = by.clone()
        return y * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.by, None


def scaled(y: Tensor, kept: Tensor) -> Tensor:
    with torch.no_grad():
        kept += 1
    return Scaled.apply(y, kept)  # type: ignore[no-untyped-call]


def batch_norm() -> nn.Module:
    return nn.BatchNorm1d(8)


def instance_norm() -> nn.Module:
    return nn.InstanceNorm1d(6, track_running_stats=True)


def eval_norm() -> nn.Module:
    return nn.BatchNorm1d(8).eval()


@pytest.mark.parametrize(
    ("module", "again"),
    [
        (Normed(batch_norm), True),
        (Normed(instance_norm), True),
        (Normed(eval_norm), True),
        (Buffered(followed), True),
        (Buffered(replaced), True),
        (Buffered(centred), False),
        (Buffered(scaled), False),
    ],
)
def test_backward_is_planned_from_all_outputs_where_forward_cannot_run_again(module: nn.Module, again: bool) -> None:
    x = torch.randn(4, 6, 8) if isinstance(getattr(module, "norm", None), nn.InstanceNorm1d) else batch()
    captured = capture(module, (x,), {}, wanted=select_losses)
    assert captured.tangents == ((0,) if again else (0, 1))
    assert can_run_again(captured) == again


def test_overwritten_is_what_forward_changes_and_nothing_else() -> None:
    captured = capture(Normed(batch_norm), (batch(),), {}, wanted=select_losses)
    names = [role.name for role in overwritten_buffers(captured).values()]
    assert names == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def of_outputs(model: Any) -> list[Fact]:
    """A loss of the output beside the loss, twice, and then of both."""
    for step in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss, y = model(batch(seed=step))
            (y.sin().sum() + (loss if step == 2 else 0)).backward()
    return []


@pytest.mark.long
@pytest.mark.parametrize("change", [followed, replaced, centred, scaled])
def test_a_loss_of_outputs_beside_the_loss_is_as_in_eager(change: Change) -> None:
    assert_alike(of_outputs, lambda: Buffered(change))


def test_a_loss_of_normed_outputs_updates_running_statistics_once() -> None:
    assert_alike(of_outputs, lambda: Normed(batch_norm))


def test_a_changed_input_is_no_reason_to_refuse_a_loss_of_other_outputs() -> None:
    def loop(model: Any) -> list[Fact]:
        x = batch()
        loss, y = model(x)
        (loss + y.cos().sum()).backward()
        return [x]

    def change(y: Tensor, kept: Tensor) -> Tensor:
        return y

    class Halving(Buffered):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x.mul_(0.5))

    assert_alike(loop, lambda: Halving(change))


@pytest.mark.parametrize("change", [followed, centred])
def test_a_step_that_writes_a_large_buffer_copies_it_no_more_than_was_forecast(change: Change) -> None:
    def wide(y: Tensor, kept: Tensor) -> Tensor:
        return change(y, kept[0, :8]) + kept[1, :8] if change is centred else change(y, kept[0, :8])

    module, x = Buffered(wide, (2, 50_000)), batch()
    compiled = memgraph.compile(module, ROOM)
    there = resident_bytes([*module.parameters(), *module.buffers(), x])
    compiled(x)[0].backward()
    compiled.zero_grad()
    _, allocated = measure_peak(lambda: compiled(x)[0].backward())
    assert allocated is not None
    assert there + allocated.peak <= compiled.plan.peak
    assert compiled.plan.measured == there + allocated.peak
