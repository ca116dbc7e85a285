"""Fake results have the strides of their kernels, so that a trace takes the ways that eager takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

import memgraph
from memgraph.capture.constant_fake_mode import ConstantFakeMode
from memgraph.profile import real_strides
from memgraph.system.trial_room import ops_within
from tests.support.compare import ROOM
from tests.support.memory_formats import LAYOUTS, OPS, SHAPES, laid_out
from tests.support.smallest_budget import smallest_of

FREQUENT = ("group_norm", "batch_norm", "conv2d", "cat", "silu", "tokens", "permuted linear", "avg_pool2d", "rrelu")


class Compared(TorchDispatchMode):
    """Runs each op on fake tensors as well, and notes those with other strides."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops, self.others = 0, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        mode = ConstantFakeMode()

        def fake(tensor: Tensor) -> Tensor:
            with mode:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

        given, named = tree_map_only(Tensor, fake, (args, kwargs or {}))
        with mode:
            found = func(*given, **named)
        pairs = list(zip(tree_leaves(result), tree_leaves(found), strict=True))
        layouts = [(a.stride(), b.stride()) for a, b in pairs if isinstance(a, Tensor) and a.numel()]
        self.ops += 1
        self.others += [(str(func), args[0].stride(), *pair) for pair in layouts if pair[0] != pair[1]]
        return result


def compare(name: str, run: Callable[[Tensor], Tensor]) -> int:
    """Return how many ops were compared, forward and backward, in all layouts."""
    compared = 0
    for shape in SHAPES:
        for layout in LAYOUTS:
            x = laid_out(shape, layout).requires_grad_()
            with Compared() as found:
                try:
                    y = run(x)
                except (RuntimeError, ValueError):  # of norms and paddings of too few elements
                    continue
                (y * torch.linspace(0, 1, y.numel()).view(y.shape)).sum().backward()
            assert found.others == [], (name, shape, layout)
            compared += found.ops
    return compared


@pytest.mark.long
@pytest.mark.parametrize("name", FREQUENT)
def test_frequent_ops_have_the_strides_of_their_kernels(name: str) -> None:
    assert compare(name, OPS[name]) > 100


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(OPS) - {*FREQUENT}))
def test_other_ops_have_the_strides_of_their_kernels(name: str) -> None:
    assert compare(name, OPS[name]) > 50


class NormToTokens(nn.Module):
    """An image in channels last becomes tokens behind a norm, and an image again, as in a UNet with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.GroupNorm(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return self.second(y.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape).square().mean()


class TokensToConv(nn.Module):
    """Tokens become an image in channels last, whose format a single image leaves open."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = nn.Linear(64, 64), nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.flatten(2).transpose(1, 2)).transpose(-1, -2).reshape(x.shape)
        return self.conv(y.to(memory_format=torch.channels_last)).square().mean()


@pytest.mark.parametrize("make, shape", [(NormToTokens, (4, 64, 32, 32)), (TokensToConv, (1, 64, 64, 16))])
@pytest.mark.parametrize("is_tight", [False, True])
def test_images_and_tokens_have_eagers_bits(
    make: Callable[[], nn.Module], shape: Sequence[int], is_tight: bool
) -> None:  # fmt: skip
    torch.manual_seed(0)
    plain, x = make(), torch.randn(*shape)
    ours = copy.deepcopy(plain)
    budget = smallest_of(lambda: memgraph.plan(ours, x, budget=1)) if is_tight else ROOM
    compiled = memgraph.compile(ours, budget, time_limit=1)
    losses = [module(x) for module in (plain, compiled)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 8), nn.BatchNorm2d(8)])
def test_a_norm_of_an_image_that_needs_no_gradient_has_eagers_bits(norm: nn.Module) -> None:
    x = torch.randn(2, 8, 4, 4)  # in channels last torch's own group norm ends the process, if x needs no gradient
    plain, ours = copy.deepcopy(norm), copy.deepcopy(norm)
    for module in (plain, memgraph.compile(ours, ROOM)):
        module(x).square().sum().backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_an_op_that_has_no_room_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(real_strides, "_known", {})
    monkeypatch.setattr(real_strides, "_run", lambda *given: ran.append(given))
    with ConstantFakeMode():
        x = torch.empty(2, 8, 4, 4).to(memory_format=torch.channels_last)
    for room, expected in ((4 * x.untyped_storage().nbytes() - 1, 0), (4 * x.untyped_storage().nbytes(), 1)):
        with ops_within(room):
            F.elu(x)
        assert len(ran) == expected


def test_ops_of_other_libraries_and_with_generators_of_the_callers_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(real_strides, "_run", lambda *given: ran.append(given))
    generator = torch.Generator()
    with ConstantFakeMode() as mode:
        x = torch.empty(2, 8, 3, 4).to(memory_format=torch.channels_last)
        for func, args in ((torch.ops.memgraph_host.draw, (x,)), (torch.ops.aten.bernoulli.p, (x, 0.5, generator))):
            overload = func if isinstance(func, torch._ops.OpOverload) else func.default
            assert real_strides.with_real_strides(overload, args, {}, x, mode) is x
    assert not ran


def test_random_numbers_are_those_of_before() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with ConstantFakeMode():
        F.rrelu(torch.empty(2, 8, 3, 5).to(memory_format=torch.channels_last), training=True)
    with _disable_current_modes():
        assert torch.equal(torch.rand(3), expected)
