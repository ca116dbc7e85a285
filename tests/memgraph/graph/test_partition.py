"""Outputs without a loss add no gradient: None where eager has None, and no NaN."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.graph.halves.partition import drop_unused, zeros_with_strides
from memgraph.storage.mapped_storage import buffer_slice_of
from tests.support.compare import Fact, assert_alike, batch, both, tight
from tests.support.models import Function


class Heads(nn.Module):
    """A trunk, three heads, and a loss of nothing but itself; the last head has an infinite slope where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.trunk(x).tanh()
        left, right = h.chunk(2, dim=1)
        return self.a(h), self.b(h * 2), (self.c(h) * 0).sqrt() + x, left * 3, right.exp()


def loss_of(*used: int) -> Callable[[Any], list[Fact]]:
    """Steps whose losses are made of these outputs, one after the other; gradients accumulate."""

    def loop(model: Any) -> list[Fact]:
        found: list[Fact] = []
        for step, place in enumerate(used):
            x = batch(seed=step).requires_grad_()
            model(x)[place].square().sum().backward()
            found.append(x.grad)
        return found

    return loop


@pytest.mark.long
@both
@pytest.mark.parametrize("used", [(0,), (1,), (3,), (4,), (0, 0), (0, 1), (1, 3, 0)])
def test_what_only_unused_outputs_depend_on_has_no_gradient(used: tuple[int, ...]) -> None:
    assert_alike(loss_of(*used), Heads)


@both
def test_several_outputs_of_many(used: tuple[int, ...] = (1, 4)) -> None:
    def loop(model: Any) -> list[Fact]:
        found = model(batch())
        torch.stack([found[i].square().sum() for i in used]).sum().backward()
        return []

    assert_alike(loop, Heads)


@tight
def test_a_second_backward_through_other_outputs() -> None:
    def loop(model: Any) -> list[Fact]:
        found = model(batch())
        found[0].sum().backward(retain_graph=True)
        found[1].sum().backward(retain_graph=True)
        (found[0] + found[4].sum()).sum().backward()
        return []

    assert_alike(loop, Heads)


@tight
def test_a_gradient_that_is_asked_for_and_is_none() -> None:
    def loop(model: Any) -> list[Fact]:
        wanted = [model.trunk.weight, model.a.weight, model.b.weight]
        return list(torch.autograd.grad(model(batch())[0].sum(), wanted, allow_unused=True))

    assert_alike(loop, Heads)
    compiled = memgraph.compile(Heads(), "1GB")
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(compiled(batch())[0].sum(), compiled.b.weight)


def test_an_unused_output_brings_no_nan() -> None:
    assert_alike(
        lambda model: [model(batch())[0].sum().backward()],
        lambda: Function(lambda linear, x: ((h := linear(x)), (h * 0).sqrt())),
    )


@tight
def test_calls_that_are_open_at_once() -> None:
    def loop(model: Any) -> list[Fact]:
        first, second = model(batch(seed=1)), model(batch(seed=2))
        (first[0].sum() + second[1].square().sum()).backward()
        return []

    assert_alike(loop, Heads)


def test_a_hook_gets_zeros_and_no_nan() -> None:
    found: list[Tensor] = []
    compiled = memgraph.compile(Heads(), "1GB")
    compiled.c.weight.register_hook(lambda g: found.append(g * 1))
    before = batch().requires_grad_()
    compiled(before * 1)[0].sum().backward()
    assert compiled.b.weight.grad is None
    assert len(found) == 1 and not found[0].any()


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_a_batch(count: int) -> None:
    torch.manual_seed(0)
    plain = Rows()
    compiled = memgraph.compile(copy.deepcopy(plain), "1GB", microbatches=count)
    for step, place in enumerate((0, 1, 1)):
        compiled(batch(seed=step))[place].sum().backward()
        sums: list[Tensor | None] = [torch.zeros_like(p) for p in plain.parameters()]
        for part in batch(seed=step).chunk(count):
            wanted = torch.autograd.grad(plain(part)[place].sum(), list(plain.parameters()), allow_unused=True)
            sums = [None if new is None or old is None else old + new for old, new in zip(sums, wanted, strict=True)]
        for p, new in zip(plain.parameters(), sums, strict=True):
            p.grad = new if p.grad is None else p.grad if new is None else p.grad + new
        for their, our in zip(plain.parameters(), compiled.parameters(), strict=True):
            assert (their.grad is None) == (our.grad is None)
            assert their.grad is None or our.grad is None or torch.equal(their.grad, our.grad)


class Rows(Heads):
    """Weights that two heads read."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.trunk(x).tanh()
        return self.a(h), self.b(self.a(h) * 2), (self.c(h) * 0 + self.a(h) * 0).sqrt()


def wide_batch(seed: int) -> Tensor:
    return torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))


def test_gradients_that_live_far_are_neither_made_nor_added_to() -> None:
    def grown() -> nn.Module:
        torch.manual_seed(0)
        return Wide()

    results = []
    for far in (False, True):
        module = grown()
        optimizer = torch.optim.Adam(module.parameters())
        called = memgraph.compile(module, 2_200_000, optimizer=optimizer, time_limit=0) if far else module
        for step, place in enumerate((0, 0, 1, 0)):
            x = wide_batch(step)
            called(x)[place].square().sum().backward()
            if step != 1:
                optimizer.step()
                optimizer.zero_grad()
        called(wide_batch(3))[1].sum().backward()
        results.append([*(p.grad for p in module.parameters()), *module.parameters()])
        if far:
            assert any(buffer_slice_of(p.detach()) for p in module.parameters())
            report: Any = called.plan
            assert report.measured <= report.peak
    for their, our in zip(*results, strict=True):
        assert (their is None) == (our is None)
        assert their is None or torch.equal(their, our)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = (nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.trunk(x).tanh()
        return self.a(h), self.b(h) + h, (self.b(h) * 0).sqrt()


def test_zeros_lie_as_they_are_asked_to() -> None:
    for like in (torch.ones(3, 4).t(), torch.ones(3, 1).expand(3, 4), torch.ones(0, 2), torch.ones(2, 3)[:, ::2]):
        found = zeros_with_strides(like.shape, like.stride(), like.dtype, like.device)
        assert (found.shape, found.stride()) == (like.shape, like.stride())
        assert not found.any() and found.untyped_storage().nbytes() <= like.untyped_storage().nbytes()


def test_an_input_that_is_read_no_more_goes_before_the_first_op() -> None:
    graph = torch.fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    both = graph.call_function(torch.ops.aten.add.Tensor, (first, second))
    graph.output((graph.call_function(torch.ops.aten.neg.default, (both,)),))
    for node in graph.nodes:
        node.meta["val"] = torch.ones(3)
    half = drop_unused(torch.fx.GraphModule(nn.Module(), graph), ["first", "second"], [1])
    code = half.code
    assert code.index("second = ") < code.index(".laid")
    assert torch.equal(half(torch.ones(3), torch.ones(3))[0], -torch.ones(3))


class Tokens(nn.Module):
    """Returns tokens of an image, which are not contiguous, and what it computes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 32, 1), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.conv(x).flatten(2).transpose(1, 2)
        return tokens, self.norm(tokens + self.linear(tokens))


def image() -> Tensor:
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def test_what_is_left_of_a_sum_has_the_strides_that_autograd_gives_it() -> None:
    assert_alike(lambda model: (model(image())[1].square().mean().backward(), ())[1], Tokens)


def sum_and(*ops: Callable[[torch.fx.Graph, torch.fx.Node], torch.fx.Node]) -> torch.fx.GraphModule:
    """Return ops behind the sum of a tangent that is not contiguous and one that is."""
    graph = torch.fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    first.meta["val"], second.meta["val"] = torch.ones(4, 3).t(), torch.ones(3, 4)
    node = graph.call_function(torch.ops.aten.add.Tensor, (first, second))
    node.meta["val"] = torch.ones(4, 3).t()
    for op in ops:
        node = op(graph, node)
    graph.output((node,))
    return torch.fx.GraphModule(nn.Module(), graph)


def test_a_view_that_the_strides_of_a_term_do_not_allow_keeps_those_of_the_sum() -> None:
    def flat(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
        turned = graph.call_function(torch.ops.aten.t.default, (node,))
        turned.meta["val"] = node.meta["val"].t()
        view = graph.call_function(torch.ops.aten.view.default, (turned, [12]))
        view.meta["val"] = torch.ones(12)
        return view

    assert drop_unused(sum_and(), ["first", "second"], [0])(torch.ones(3, 4), torch.ones(3, 4))[0].is_contiguous()
    second = torch.arange(12.0).view(3, 4)
    found = drop_unused(sum_and(flat), ["first", "second"], [0])(torch.ones(3, 4), second)[0]
    assert torch.equal(found, second.t().reshape(12))
