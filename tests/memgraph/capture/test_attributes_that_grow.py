"""Tensors that forward keeps in attributes are there after each step; what grows is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memgraph

WIDTH = 8


class Keeping(nn.Module):
    def __init__(self, keep: Callable[[Keeping, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(WIDTH, WIDTH), keep
        self.cache: Tensor | None = None
        self.seen: list[int] = []
        self.register_buffer("bank", torch.zeros(0, WIDTH))
        self.bank: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.keep(self, self.linear(x))


def last(module: Keeping, y: Tensor) -> Tensor:
    module.cache = y.detach()
    return y


def lazily(module: Keeping, y: Tensor) -> Tensor:
    if module.cache is None:
        module.cache = torch.linspace(0, 1, len(y))[:, None]
    return y + module.cache


def appended(module: Keeping, y: Tensor) -> Tensor:
    module.bank = torch.cat([module.bank, y.detach()])
    return y + module.bank.mean()


def listed(module: Keeping, y: Tensor) -> Tensor:
    module.seen.append(len(y))
    return y / len(module.seen)


REFUSED: dict[Callable[[Keeping, Tensor], Tensor], str] = {
    appended: r"assigns torch\.float32 \(4, 8\) to buffer (part\.)?bank, which is torch\.float32 \(0, 8\)",
}


class Around(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(WIDTH, WIDTH), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.first(x))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("keep", REFUSED)
def test_a_tensor_that_forward_keeps_is_refused_by_name(
    keep: Callable[[Keeping, Tensor], Tensor], inside: bool
) -> None:
    model = Around(Keeping(keep)) if inside else Keeping(keep)
    with pytest.raises(memgraph.CaptureError, match=REFUSED[keep]):
        memgraph.compile(model, "1MB")(torch.randn(4, WIDTH))


@pytest.mark.parametrize("inside", [False, True])
def test_a_cache_that_the_plain_module_has_made_is_read(inside: bool) -> None:
    ours = Around(Keeping(lazily)) if inside else Keeping(lazily)
    ours(torch.randn(4, WIDTH))
    theirs, compiled = copy.deepcopy(ours), memgraph.compile(ours, "1MB")
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        assert torch.equal(compiled(x), theirs(x))
    assert not compiled.plan.opaque


def test_a_list_that_grows_is_refused_in_the_whole_model_and_grows_in_a_submodule() -> None:
    with pytest.raises(memgraph.CaptureError, match="changes seen, which changes its next call"):
        memgraph.compile(Keeping(listed), "1MB")(torch.randn(4, WIDTH))
    ours = Around(Keeping(listed))
    theirs, compiled = copy.deepcopy(ours), memgraph.compile(ours, "1MB")
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        assert torch.equal(compiled(x), theirs(x))
    assert [row.path for row in compiled.plan.opaque] == ["part"]
