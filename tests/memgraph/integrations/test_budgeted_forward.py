"""A module with a budgeted forward is the plain one in all that is changed about it from outside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memgraph.errors import CaptureError
from memgraph.integrations.budgeted_forward import ModuleBudget, TrainerReads


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


def budgeted(**own: Any) -> tuple[Scaled, ModuleBudget]:
    module = Scaled()
    budget = ModuleBudget("1GB", {"time_limit": 0})
    budget.cover(module, lambda: {**own, **trainer_of(own)})
    return module, budget


def trainer_of(own: dict[str, Any]) -> dict[str, Any]:
    reads = own.get("_trainer")
    return {"_trainer_reads": reads.refreshed()} if isinstance(reads, TrainerReads) else {}


def kinds(budget: ModuleBudget) -> int:
    assert budget.compiled is not None
    return len(budget.compiled._kept.steps)


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
    module, budget = budgeted(seen=None)
    for number in range(4):
        module.seen = f"{number}"
        gradient(module)
    assert kinds(budget) == 1


def test_a_step_depends_on_what_it_reads_of_a_trainer_and_on_nothing_else() -> None:
    trainer, plain = SimpleNamespace(epoch=0, step=0), Scaled()
    plain._trainer = trainer
    module, budget = budgeted(_trainer=TrainerReads(trainer))
    found = []
    for epoch in (0, 0, 0, 1, 1):
        trainer.epoch, trainer.step = epoch, trainer.step + 1
        assert all(map(torch.equal, gradient(module), gradient(plain)))
        found.append(kinds(budget))
    assert found == [1, 2, 2, 3, 3]  # the first step did not know yet that epoch is read


class Cache:
    """The states of earlier tokens."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []


class Words(nn.Module):
    """A model of language whose cache has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, filled: Cache | None = None) -> Tensor:
        y: Tensor = self.layer(x)
        if filled is not None:
            filled.states.append(y)
            y = y + torch.stack(filled.states).sum(0)
        return y

    def generate(self, x: Tensor, filled: Cache | None = None) -> Tensor:
        for _ in range(3):
            x = self(x, filled)
        return x


class Around(nn.Module):
    """A module whose `generate` calls a submodule."""

    def __init__(self, words: Words) -> None:
        super().__init__()
        self.words = words

    def generate(self, x: Tensor) -> Tensor:
        return self.words(self.words(x))


def budgeted_words() -> tuple[Words, ModuleBudget]:
    module = Words()
    budget = ModuleBudget("1GB", {"time_limit": 0})
    budget.cover(module)
    return module, budget


def test_generate_without_gradients_runs_the_plain_forward_whoever_has_it_and_whatever_it_is_given() -> None:
    (module, budget), plain, x = budgeted_words(), Words(), torch.ones(2, 8)
    with torch.no_grad():
        assert torch.equal(module.generate(x), plain.generate(x))
        assert torch.equal(module.generate(x, Cache()), plain.generate(x, Cache()))
        assert torch.equal(Around(module).generate(x), Around(plain).generate(x))
    assert budget.compiled is None
    assert torch.equal(module.generate(x), plain.generate(x)) and budget.compiled is not None


def test_what_is_not_generate_of_the_module_is_planned_without_gradients() -> None:
    def generate(other: nn.Module, module: nn.Module) -> Tensor:
        y: Tensor = module(torch.ones(2, 8))
        return y

    module, budget = budgeted_words()
    with torch.no_grad():
        generate(Words(), module)
    assert kinds(budget) == 1


def test_a_cache_that_forward_fills_is_filled_outside_of_the_budget_and_refused_with_gradients() -> None:
    (module, budget), plain, x = budgeted_words(), Words(), torch.ones(2, 8)
    ours, theirs = Cache(), Cache()
    with (
        torch.no_grad(),
        pytest.warns(RuntimeWarning, match="a Cache: calls with one run outside of the budget") as said,
    ):
        for _ in range(3):
            assert torch.equal(module(x, ours), plain(x, theirs))
    assert len(said) == 1 and all(map(torch.equal, ours.states, theirs.states)) and kinds(budget) == 0
    with pytest.raises(CaptureError, match="changes its argument `filled`"):
        module(x, Cache())
