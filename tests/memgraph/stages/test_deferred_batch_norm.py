"""With deferred_batch_norm the running statistics are those of a BatchNorm that sees the whole mini-batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.stages.stage_cut import StageCut
from tests.support.ranks import on_ranks


class First(nn.Module):
    """The first norm sees the input, so that its statistics do not depend on how others normalize."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm2d(4, momentum=momentum), nn.Conv2d(4, 4, 3)
        self.second, self.free = nn.BatchNorm1d(4, momentum=momentum), nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layer(self.norm(x)).relu().mean((2, 3))
        return F.cross_entropy(self.free(self.second(x)), y)


def _batch(rows: int) -> dict[str, Tensor]:
    return {"x": 3 + torch.randn(rows, 4, 6, 6), "y": torch.randint(0, 4, (rows,))}


def _statistics(rank: int, momentum: float | None, is_meta: bool) -> list[tuple[str, bool]]:
    """Return each statistic of this rank, and whether it is that of the plain model."""
    torch.manual_seed(0)
    model = First(momentum)
    plain, keys = copy.deepcopy(model), list(model.state_dict())
    if is_meta:
        model = model.to("meta")
    pipe = memgraph.pipeline(model, "1GB", 3, deferred_batch_norm=True)
    batches = [_batch(rows) for rows in (12, 12, 8)]
    pipe.prepare(**batches[0])
    pipe.load_state_dict(plain.state_dict())
    for batch in batches:
        pipe.step(**batch)
        with torch.no_grad():  # the norms as they see the whole mini-batch, normalized in parts
            plain.norm(batch["x"])
            parts = [_normalized(each, plain.norm) for each in batch["x"].chunk(3)]
            plain.second(plain.layer(torch.cat(parts)).relu().mean((2, 3)))
    assert list(model.state_dict()) == keys
    known = dict(plain.named_buffers())
    own = {key: value for key, value in model.named_buffers() if key in known and not value.is_meta}
    model.eval()
    pipe.step(**batches[0])  # reads them
    return [(key, torch.allclose(value, known[key], rtol=1e-5)) for key, value in own.items()]


def _normalized(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)


@pytest.mark.long
@pytest.mark.parametrize("momentum, is_meta", [(0.1, False), (None, False), (0.1, True)])
def test_statistics_are_those_of_the_whole_mini_batch(momentum: float | None, is_meta: bool) -> None:
    first, last = on_ranks(2, _statistics, momentum, is_meta)
    found = dict((*first, *last))
    names = [
        f"{norm}.{key}" for norm in ("norm", "second") for key in ("running_mean", "running_var", "num_batches_tracked")
    ]
    assert found == dict.fromkeys(names, True)


class Averaged(nn.Module):
    """A module of one's own that updates two averages, with a layer between their updates, and reads both in eval()."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(4))
        self.register_buffer("high", torch.zeros(4))
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.get_buffer("low"), self.get_buffer("high")
        if not self.training:
            return (x - low) @ self.weight / (1 + high)
        with torch.no_grad():
            low.lerp_(x.amin(0), 0.5)
        x = (x @ self.weight).tanh().sin()
        with torch.no_grad():
            high.lerp_(x.amax(0), 0.5)
        return x


class Norms(nn.Module):
    """Norms alone, so that most places to cut are among the updates of their statistics."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.last = norm, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.norm(x)), x)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), Averaged()])
def test_no_cut_parts_the_buffers_of_a_module_that_forward_updates(norm: nn.Module) -> None:
    pipe = memgraph.pipeline(Norms(norm), "1GB", 2, deferred_batch_norm=True)
    pipe.prepare(torch.randn(8, 4))
    step = pipe._latest.cut.step
    names = [*step.tensors.values()]
    for place in step.costs.borders[1:-1]:
        stages = [{name for name in owned if "norm" in name} for owned in StageCut(step, (0, place)).owned(names)]
        assert not all(stages), (place, stages)


def _switched(rank: int) -> list[bool]:
    """Return whether training and evaluation in turn are those of the plain model, on the last rank."""
    torch.manual_seed(0)
    model = Norms(Averaged())
    plain, x, found = copy.deepcopy(model), torch.randn(8, 4), list[bool]()
    pipe = memgraph.pipeline(model, "1GB", 1)
    for training in (True, False, True, False):
        model.train(training)
        plain.train(training)
        with torch.set_grad_enabled(training):
            loss = pipe.step(x)
            found.append(loss is None or loss.equal(plain(x)))
    return found


@pytest.mark.long
def test_a_module_that_evaluation_reads_otherwise_is_evaluated_in_stages() -> None:
    assert on_ranks(2, _switched) == [[True] * 4] * 2


class Own(nn.BatchNorm2d):
    """A BatchNorm of one's own."""


@pytest.mark.parametrize("kind", [Own, nn.SyncBatchNorm])
def test_other_classes_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=kind.__name__):
        memgraph.pipeline(nn.Sequential(kind(4)), "1GB", deferred_batch_norm=True)
