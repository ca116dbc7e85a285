"""A collective in forward is refused with its line, before it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

import memgraph

WIDTH = 8


class Reducing(nn.Module):
    """Reduces the whole result, or whether any of it is infinite, and branches on that."""

    def __init__(self, reduce: Callable[[Tensor], Tensor], branches: bool) -> None:
        super().__init__()
        self.linear, self.reduce, self.branches = nn.Linear(WIDTH, WIDTH), reduce, branches

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        found = self.reduce((~torch.isfinite(y)).any().float())
        return torch.nan_to_num(y) if self.branches and found > 0 else y + found


class AsksFirst(Reducing):
    """Needs a real run for its values, which comes to the collective too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_place(found: Tensor) -> Tensor:
    dist.all_reduce(found)
    return found


def functionally(found: Tensor) -> Tensor:
    return functional.all_reduce(found, "sum", dist.group.WORLD)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("branches", [True, False])
@pytest.mark.parametrize("reduce", [in_place, functionally])
@pytest.mark.parametrize("kind", [Reducing, AsksFirst])
@pytest.mark.parametrize("opaque", [True, False, ["1"]])
@pytest.mark.usefixtures("group")
def test_a_collective_in_forward_is_refused_with_its_line(
    kind: type[Reducing], reduce: Callable[[Tensor], Tensor], branches: bool, opaque: bool | Sequence[str]
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(reduce, branches))
    compiled = memgraph.compile(model, "1MB", opaque=opaque)
    message = r"collective of torch\.distributed \(all_?reduce\) at \S*test_refused_collectives\.py:\d+ in "
    with pytest.raises(memgraph.CaptureError, match=message + r"[\s\S]*outside of the module"):
        compiled(torch.randn(4, WIDTH))
