"""A module with a budgeted forward is the plain one in all that is changed about it from outside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from memgraph.integrations.budgeted_forward import BudgetedForward
from memgraph.integrations.trainer_reads import TrainerReads


class Scaled(nn.Module):
    """A module whose forward reads attributes that others set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale, self.seen = nn.Linear(8, 8), 1, "nothing"
        self._trainer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).sum() * self.scale + getattr(self, "late", 0)
        return y * (1 + self._trainer.epoch) if self._trainer else y


def gradient(module: nn.Module) -> list[Tensor]:
    module.zero_grad()
    module(torch.ones(4, 8)).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def budgeted(**own: Any) -> tuple[Scaled, BudgetedForward]:
    module = Scaled()
    forward = BudgetedForward(module, "1GB", {"time_limit": 0}, lambda: {**own, **trainer_of(own)})
    module.forward = forward  # type: ignore[method-assign]
    return module, forward


def trainer_of(own: dict[str, Any]) -> dict[str, Any]:
    reads = own.get("_trainer")
    return {"_trainer_reads": reads.refreshed()} if isinstance(reads, TrainerReads) else {}


def kinds(forward: BudgetedForward) -> int:
    assert forward.compiled is not None
    return len(forward.compiled._kept.steps)


def test_attributes_that_are_set_added_and_deleted_count_in_the_next_step() -> None:
    (module, _), plain = budgeted(), Scaled()
    for name, value in (("scale", 3), ("late", 2)):
        for each in (module, plain):
            setattr(each, name, value)
        x = torch.ones(4, 8)
        assert torch.equal(module(x), plain(x))
        assert all(map(torch.equal, gradient(module), gradient(plain)))
    del module.late, plain.late
    assert torch.equal(module(torch.ones(4, 8)), plain(torch.ones(4, 8)))


def test_own_attributes_are_those_of_the_step_and_changes_of_others_plan_nothing() -> None:
    module, forward = budgeted(seen=None)
    for number in range(4):
        module.seen = f"{number}"
        gradient(module)
    assert kinds(forward) == 1


def test_a_step_depends_on_what_it_reads_of_a_trainer_and_on_nothing_else() -> None:
    trainer, plain = SimpleNamespace(epoch=0, step=0), Scaled()
    plain._trainer = trainer
    module, forward = budgeted(_trainer=TrainerReads(trainer))
    found = []
    for epoch in (0, 0, 0, 1, 1):
        trainer.epoch, trainer.step = epoch, trainer.step + 1
        assert all(map(torch.equal, gradient(module), gradient(plain)))
        found.append(kinds(forward))
    assert found == [1, 2, 2, 3, 3]  # the first step did not know yet that epoch is read
