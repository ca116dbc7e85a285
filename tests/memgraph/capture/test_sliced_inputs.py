"""An input that is a slice of a larger tensor takes what it spans, also where forward writes into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph

Cut = Callable[[Tensor], Tensor]
CUTS: dict[str, Cut] = {
    "columns": lambda whole: whole[:, :64],
    "block": lambda whole: whole[10:74, 100:164],
    "steps": lambda whole: whole[::8, ::8],
    "transposed": lambda whole: whole[:64, :64].t(),
    "rows": lambda whole: whole.view(-1, 64)[5:69],
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "all": lambda x: x.add_(1),
    "a row": lambda x: x[0].zero_(),
    "a column": lambda x: x[:, 0].mul_(2),
    "a diagonal": lambda x: x.diagonal().fill_(3.0),
    "a view of a view": lambda x: x[1:].t()[2:5].square_(),
    "a copy": lambda x: x.copy_(x.flip(0)),
    "by index": lambda x: x.index_put_((torch.tensor([1, 2]),), torch.tensor(5.0)),
}


class Writes(nn.Module):
    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.write = nn.Linear(64, 64), write

    def forward(self, x: Tensor) -> Tensor:
        before = self.linear(x * 2)
        self.write(x)
        return (before * self.linear(x)).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("cut", CUTS)
def test_a_write_into_a_slice_takes_no_more_than_foretold(cut: str, write: str) -> None:
    module = Writes(WRITES[write])
    compiled = memgraph.compile(module, "1GB")
    found = []
    for model in (module, compiled):
        whole = torch.randn(512, 512, generator=torch.Generator().manual_seed(3))
        loss = model(CUTS[cut](whole))
        loss.backward()
        found.append((loss, whole, *(p.grad for p in module.parameters())))
        module.zero_grad()
    assert all(torch.equal(their, our) for their, our in zip(*found, strict=True))
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak


def test_a_plan_holds_for_slices_of_whatever_size() -> None:
    compiled = memgraph.compile(Writes(WRITES["a row"]), "1GB")
    peaks = []
    for rows in (64, 4096):
        compiled(torch.randn(rows, 64)[:64]).backward()
        peaks.append(compiled.plan.peak)
        assert compiled.plan.measured is not None
        assert compiled.plan.measured <= compiled.plan.peak
        compiled.zero_grad()
    assert peaks[0] == peaks[1]
    assert len(compiled._kept.steps) == 1


def test_a_buffer_that_is_a_slice() -> None:
    class Cache(nn.Module):
        kept: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("kept", torch.zeros(1 << 18)[: 64 * 64].view(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.kept[:8] = x[:8]
            return (self.linear(x) + self.kept).sum()

    compiled = memgraph.compile(Cache(), "1GB")
    x = torch.randn(64, 64)
    compiled(x).backward()
    assert torch.equal(compiled.kept[:8], x[:8])
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak
