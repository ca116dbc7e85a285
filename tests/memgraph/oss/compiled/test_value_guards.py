"""Under a sharded optimizer all ranks undo a run together, or none does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph.errors import AgreementError
from tests.support.ranks import on_ranks

ROOM = 1 << 30
FLAGS = ((0, 0), (0, 0), (1, 1), (0, 1), (1, 1), (0, 0))  # of both ranks, by step


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        x = self.norm(nn.functional.dropout(self.first(x)))
        if flag.any():
            x = x.tanh()
        return self.last(x).square().mean()


def _train(rank: int, gather: str) -> list[str]:
    """Return what differs from plain steps on the same batches, or is not undone."""
    model, plain = Branching(), Branching()
    sharded = memgraph.OSS(model.parameters(), optim.AdamW, lr=0.01, gather=gather)
    update = optim.AdamW(plain.parameters(), lr=0.01)
    compiled: Any = memgraph.compile(model, ROOM, optimizer=sharded, time_limit=0.0)
    wrong = []
    for step, flags in enumerate(FLAGS):
        x, flag = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)), torch.tensor([flags[rank]])
        torch.manual_seed(step)
        before = [torch.get_rng_state(), *(buffer.clone() for buffer in model.buffers())]
        if flags[0] != flags[1]:
            try:
                compiled(x, flag)
                wrong.append(f"step {step} ran")
            except AgreementError as error:
                wrong += [] if "reduce the value over the ranks outside of the module" in str(error) else [str(error)]
            if not all(map(torch.equal, before, [torch.get_rng_state(), *model.buffers()])):
                wrong.append(f"step {step} was not undone")
            continue
        compiled(x, flag).backward()
        sharded.step()
        sharded.zero_grad()
        torch.manual_seed(step)
        plain(x, flag).backward()
        update.step()
        update.zero_grad()
        sharded.gather()
        if not all(map(torch.equal, model.state_dict().values(), plain.state_dict().values())):
            wrong.append(f"step {step} differs")
    return wrong + ([] if len(compiled.plans) == 2 else [f"{len(compiled.plans)} plans"])


def test_ranks_undo_a_run_together_or_not_at_all() -> None:
    assert on_ranks(2, _train, "step") == [[], []]


def test_parameters_that_forward_gathers_are_gathered_for_the_second_run_too() -> None:
    assert on_ranks(2, _train, "forward") == [[], []]
