"""Buffers are written where they are, as eager writes them: no new value as large as the buffer, and the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import memgraph
from memgraph.capture.capture import capture
from memgraph.graph.captured import Captured
from memgraph.graph.nodes import allocates_nothing, tensors
from tests.support.captured_calls import agrees

X = torch.linspace(-1, 1, 24).view(6, 4)
Body = Callable[["Bank", Tensor], Any]


class Bank(nn.Module):
    """A layer, and a buffer that is large beside all that the layer makes."""

    bank: Tensor

    def __init__(self, then: Body, shape: tuple[int, ...] = (4, 96)) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.then = then
        self.register_buffer("bank", torch.linspace(-2, 2, 384).view(shape).clone())

    def forward(self, x: Tensor) -> Any:
        return self.then(self, self.layer(x))


def large(captured: Captured, phase: str = "forward") -> list[fx.Node]:
    """The ops that make as many bytes as the buffer has."""
    nodes = [n for n in captured.graph.graph.nodes if n.op == "call_function" and n.meta["phase"] == phase]
    return [n for n in nodes if not allocates_nothing(n) and max(t.numel() for t in tensors(n)) >= 384]


def no_grad(write: Callable[[Tensor, Tensor], object]) -> Body:
    """A forward that writes without gradients, beside a loss that reads some of the bank before."""

    def then(module: Bank, y: Tensor) -> Tensor:
        loss = (y @ module.bank.view(4, 96)[:, :8].clone()).logsumexp(1).mean()
        with torch.no_grad():
            write(module.bank, y)
        return loss

    return then


def queue(bank: Tensor, y: Tensor) -> None:
    bank[:, 2:8] = y.t()


def wrapped(bank: Tensor, y: Tensor) -> None:
    bank[:, :3], bank[:, -3:] = y[:3].t(), y[3:].t()


def one(bank: Tensor, y: Tensor) -> None:
    bank[1, 3:7] = y[0]


def picked(bank: Tensor, y: Tensor) -> None:
    bank[:, torch.tensor([5, 3, 1, 90, 2, 7])] = y.t()


def added(bank: Tensor, y: Tensor) -> None:
    bank.index_add_(1, torch.tensor([5, 3, 1, 90, 2, 7]), y.t())


def average(bank: Tensor, y: Tensor) -> None:
    bank.mul_(0.9).add_(y.mean(0)[:, None], alpha=0.1)


def drawn(bank: Tensor, y: Tensor) -> None:
    bank.lerp_(y.mean(0)[:, None].expand(4, 96), 0.1)


def assigned(bank: Tensor, y: Tensor) -> None:
    bank.copy_(bank * 0.9 + y.mean(0)[:, None])


def column(bank: Tensor, y: Tensor) -> None:
    bank[:, ::7].sigmoid_().add_(y.mean())


def corner(bank: Tensor, y: Tensor) -> None:
    bank[1:3][:, 5:20].mul_(0.5).sub_(y[0, 0]).tanh_()


def diagonal(bank: Tensor, y: Tensor) -> None:
    bank.diagonal().copy_(y[2])


def masked(bank: Tensor, y: Tensor) -> None:
    bank.masked_fill_(bank > y.mean(), 0.5)


def cleared(bank: Tensor, y: Tensor) -> None:
    bank[2].zero_()
    bank[3:].fill_(2.0)


def shifted(bank: Tensor, y: Tensor) -> None:
    bank[:, 6:12] = bank[:, :6].clone()
    bank[:, :6] = y.t()


def halves(bank: Tensor, y: Tensor) -> None:
    bank[:, :4] = bank[:, :4] * 0.5
    bank[:, 4:8] += bank[:, :4]


WRITES = (
    *(queue, wrapped, one, picked, added, average, drawn),
    *(column, corner, diagonal, masked, cleared, shifted, halves),
)


@pytest.mark.long
@pytest.mark.parametrize("write", WRITES)
def test_a_buffer_is_written_where_it_is(write: Callable[[Tensor, Tensor], object]) -> None:
    captured = agrees(Bank(no_grad(write)), X)
    masks = [node for node in large(captured) if node.meta["val"].dtype == torch.bool]
    assert large(captured) == masks


@pytest.mark.parametrize("write", [queue, average, column])
def test_it_lies_as_it_did(write: Callable[[Tensor, Tensor], object]) -> None:
    module = Bank(no_grad(write))
    module.bank = module.bank.t().contiguous().t()
    assert not large(agrees(module, X))


def reads_new(module: Bank, y: Tensor) -> Tensor:
    with torch.no_grad():
        module.bank[:, : len(y)] = y.t()
    return (y @ module.bank).logsumexp(1).mean()


def reads_between(module: Bank, y: Tensor) -> Tensor:
    with torch.no_grad():
        module.bank.mul_(0.5)
        seen = module.bank.sum(1)
        module.bank[:, : len(y)] = y.t()
    return (y + seen).square().mean()


@pytest.mark.parametrize("then", [reads_new, reads_between])
def test_ops_may_read_what_was_written(then: Body) -> None:
    module = Bank(then, (4, 96))
    captured = agrees(module, X[:2])
    assert not [node for node in large(captured) if node.meta["val"].shape == module.bank.shape]


def reads_old(module: Bank, y: Tensor) -> Tensor:
    old = module.bank.clone()
    with torch.no_grad():
        module.bank.add_(1.0)
    return (y @ (module.bank - old)).mean()


def old_view(module: Bank, y: Tensor) -> Tensor:
    before = module.bank[:, :6] * 1
    with torch.no_grad():
        module.bank[:, :6] = y.t()
        module.bank.mul_(2)
    return (y @ before).mean() + module.bank.mean()


def another(module: Bank, y: Tensor) -> Tensor:
    module.bank = module.bank * 0.9 + y.detach().mean()
    return (y @ module.bank).square().mean()


def handed(module: Bank, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        module.bank.mul_(0.9)
    return y.square().mean(), module.bank + 0


def much(module: Bank, y: Tensor) -> Tensor:
    with torch.no_grad():
        module.bank.view(384)[:4] += y.mean(0)
    wide = y.repeat(1, 384) * module.bank.view(384).repeat(4)
    return (wide - module.bank.view(384).repeat(4)).exp().mean()


@pytest.mark.parametrize("then", [reads_old, old_view, another, handed, much, no_grad(assigned)])
def test_what_else_reads_it_reads_what_eager_reads(then: Body) -> None:
    agrees(Bank(then), X)


def test_ops_that_read_what_was_written_may_run_again_if_they_are_large() -> None:
    captured = capture(Bank(lambda m, y: much(m, y)), (X,), {})
    changing = [str(n.target) for n in captured.graph.graph.nodes if n.op == "call_function" and not n.users]
    assert "aten.copy_.default" in changing and "aten.add_.Tensor" not in changing


def test_two_forwards_before_a_backward_that_reads_the_buffer_are_refused_as_in_eager() -> None:
    module = Bank(reads_new)
    for model in (copy.deepcopy(module), memgraph.compile(copy.deepcopy(module), 10**9)):
        first = model(X[:2])
        model(X[:2])
        with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|in place)"):
            first.backward()


def test_statistics_of_batches_are_not_copied() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    captured = agrees(module, torch.randn(2, 3, 8, 8))
    nodes = list(captured.graph.graph.nodes)
    assert torch.ops.aten.clone.default not in {node.target for node in nodes}
    norm = next(i for i, node in enumerate(nodes) if "native_batch_norm" in str(node.target))
    copies = [i for i, node in enumerate(nodes) if node.target is torch.ops.aten.copy_.default]
    assert len(copies) == 2 and max(copies) < norm + 8  # right behind what makes them


class Moco(nn.Module):
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 128)
        self.register_buffer("queue", torch.randn(128, 4096))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.layer(x))
        loss = (q @ self.queue[:, :256].clone()).logsumexp(1).mean()
        with torch.no_grad():
            self.queue[:, : len(x)] = q.t()
        return loss


class ChunkedSoftmax(torch.autograd.Function):
    """The logarithm of the sum of exponentials over rows of a weight, a chunk at a time, through one buffer."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        buffer, total = torch.empty(len(hidden), 64), torch.full((len(hidden),), -torch.inf)
        for begin in range(0, len(weight), 60):
            tile = buffer[:, : len(weight[begin : begin + 60])]
            torch.mm(hidden, weight[begin : begin + 60].t(), out=tile)
            total = torch.logaddexp(total, tile.logsumexp(1))
        ctx.save_for_backward(hidden, weight, total)
        return total

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, total = ctx.saved_tensors
        of_hidden, of_weight, buffer = torch.zeros_like(hidden), torch.zeros_like(weight), torch.empty(len(hidden), 64)
        for begin in range(0, len(weight), 60):
            rows = weight[begin : begin + 60]
            tile = buffer[:, : len(rows)]
            torch.mm(hidden, rows.t(), out=tile)
            tile.copy_(torch.exp(tile - total[:, None]) * tangent[:, None])
            of_hidden += tile @ rows
            of_weight[begin : begin + 60] += tile.t() @ hidden
        return of_hidden, of_weight


class Filling(nn.Module):
    """Fills tensors part by part."""

    def __init__(self, then: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.weight, self.then = nn.Linear(4, 32), nn.Parameter(torch.randn(400, 32)), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.layer(x))


def chunked(module: Any, y: Tensor) -> Tensor:
    return torch.as_tensor(ChunkedSoftmax.apply(y, module.weight)).mean()  # type: ignore[no-untyped-call]


def filled(module: Any, y: Tensor) -> Tensor:
    """Backward reads it."""
    out = torch.zeros(6, 64)
    out[:, :32], out[:, 32:] = y.exp(), y.sin()
    return (out @ module.weight.view(-1, 64).t()).logsumexp(1).mean()


def older(module: Any, y: Tensor) -> Tensor:
    """An older value is read behind the next write."""
    out = torch.zeros(6, 64)
    out[:, :32] = y.detach()
    before = out.clone()
    out[:, 32:] = y.detach()
    return (y * before[:, :32] * out[:, 32:]).mean() + module.weight.mean()


def copied_before(module: Any, y: Tensor) -> Tensor:
    """A copy of what is written to later stays as it was."""
    out = y.detach() * 2
    kept = out.clone()
    out[0] = 5.0
    return (y * kept).mean() + (y * out).sum() + module.weight.mean()


def passed_on(module: Any, y: Tensor) -> Tensor:
    """A view is read behind a later write."""
    out = torch.zeros(6, 64)
    first = out[:, :32]
    out[:, :32] = y.detach()
    return (y * first).mean() + module.weight.mean()


@pytest.mark.parametrize("then", [chunked, filled, older, copied_before, passed_on])
def test_values_that_are_filled_part_by_part_are_those_of_eager(then: Any) -> None:
    torch.manual_seed(0)
    module = Filling(then)
    plain = copy.deepcopy(module)
    compiled = memgraph.compile(module, "1GB")
    for _ in range(2):
        x = torch.randn(6, 4)
        loss, expected = compiled(x), plain(x)
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
        for one, other in zip(module.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or (other.grad is not None and torch.equal(one.grad, other.grad))


def test_a_buffer_that_is_filled_for_each_chunk_is_written_in_place() -> None:
    """A copy of the whole for each chunk would take as much again, and its time."""
    captured = capture(Filling(chunked), (X,), {})
    targets = [str(node.target) for node in captured.graph.graph.nodes]
    assert not [target for target in targets if "scatter" in target]
    assert sum("aten.copy_" in target or "aten.add_" in target for target in targets) >= 21


def test_what_backward_reads_of_a_filled_value_can_be_computed_again() -> None:
    captured = capture(Filling(filled), (X,), {})
    forward = [node for node in captured.graph.graph.nodes if node.meta.get("phase") == "forward"]
    assert [str(node.target) for node in forward if "slice_scatter" in str(node.target)]
