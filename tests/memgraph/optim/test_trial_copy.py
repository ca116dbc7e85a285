"""Any optimizer is tried on made-up parameters by a copy of all that it keeps: tables, settings, other optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import memgraph
from memgraph.optim.optimizer_profiler import update_nbytes
from memgraph.optim.trial_copy import UntriedUpdateError, trial_copy
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.system.device import CPU
from memgraph.tensors.parameter_groups import state_tensors

Update = Callable[[nn.Module], optim.Optimizer]


class Chain(optim.Optimizer):
    """Steps several optimizers in turn."""

    def __init__(self, *chained: optim.Optimizer) -> None:
        self.inner = list(chained)
        super().__init__([p for each in chained for group in each.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.inner:
            each.step()


class Settings:
    def __init__(self) -> None:
        self.rates, self.tried = {"fast": 0.1}, 0


class Looking(optim.Optimizer):
    """Keeps objects and tables, as optimizers with states of few bits do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rate": "fast"})
        self.settings, self.table = Settings(), torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.settings.tried += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    codes = self.state[p].setdefault("codes", torch.zeros_like(p, dtype=torch.uint8))
                    p.sub_(self.table[codes.long()] + p.grad, alpha=self.settings.rates[group["rate"]])


class Following(optim.Optimizer):
    """Holds an optimizer of the same parameters, and has states beside its."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.detach().clone())


def muon_and_adamw(module: nn.Module) -> Chain:
    matrices = [p for p in module.parameters() if p.dim() == 2]
    return Chain(optim.Muon(matrices, lr=0.01), optim.AdamW([p for p in module.parameters() if p.dim() != 2]))


def looking(module: nn.Module) -> Looking:
    return Looking(module.parameters())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.GELU())))


def train(module: nn.Module, update: optim.Optimizer, step: Any) -> None:
    for seed in range(3):
        x = torch.randn(256, 96, generator=torch.Generator().manual_seed(seed))
        F.mse_loss(step(x), x).backward()
        update.step()
        update.zero_grad()


@pytest.mark.parametrize("made", [muon_and_adamw, looking])
def test_what_an_update_takes_is_counted(made: Update) -> None:
    module = net()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    update, before = made(module), copy.deepcopy(module.state_dict())
    states, workspace = update_nbytes(update)
    assert not list(state_tensors(update))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    update.step()
    _, allocated = measure_peak(update.step, CPU)
    assert allocated is not None and allocated.peak <= workspace
    assert states == resident_bytes(state_tensors(update)) > 0


@pytest.mark.parametrize("made", [muon_and_adamw, looking])
def test_a_step_with_its_states_trains_as_eager_and_keeps_its_budget(made: Update) -> None:
    ours, theirs = net(), net()
    update = made(ours)
    room = memgraph.plan(ours, torch.zeros(256, 96), budget="1GB", optimizer=update, time_limit=0).peak
    model = memgraph.compile(ours, room - 200_000, optimizer=update, time_limit=0)
    train(ours, update, model)
    train(theirs, made(theirs), theirs)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert model.plan.measured is not None and model.plan.measured <= model.plan.peak <= room - 200_000


def test_an_optimizer_beside_another_of_the_same_parameters_is_refused() -> None:
    module = net()
    with pytest.raises(UntriedUpdateError, match="Following can't be planned, since it holds SGD"):
        memgraph.compile(module, "1GB", optimizer=Following(optim.SGD(module.parameters())))(torch.zeros(8, 96))


def test_a_copy_shares_no_objects_and_has_no_hooks() -> None:
    module = net()
    update = looking(module)
    calls: list[int] = []
    update.register_step_post_hook(lambda *_: calls.append(1))
    other = trial_copy(update, {parameter: torch.ones(2) for parameter in module.parameters()})
    type(other).step(other)
    assert (update.settings.tried, other.settings.tried, calls) == (0, 1, [])  # type: ignore[attr-defined]
    assert other.param_groups[0]["params"][0].shape == (2,)


def test_a_copy_of_a_chain_has_the_others_in_each_of_its_optimizers() -> None:
    module = net()
    others: dict[Tensor, Tensor] = {parameter: torch.ones_like(parameter) for parameter in module.parameters()}
    other: Any = trial_copy(muon_and_adamw(module), others)
    found = [p for each in other.inner for group in each.param_groups for p in group["params"]]
    assert {id(p) for p in found} == {id(p) for p in others.values()}


class Compiled(torch.optim.SGD):
    """SGD by a function that Dynamo compiles, and that must not run in another way."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    torch.compile(_descend, backend="eager", fullgraph=True)(p.detach(), p.grad, group["lr"])


def _descend(p: Tensor, grad: Tensor, rate: float) -> None:
    p.sub_(rate * grad)


def test_a_compiled_update_that_was_tried_is_compiled_in_training() -> None:
    torch.manual_seed(0)
    module = nn.Linear(512, 512)
    optimizer = Compiled(module.parameters(), lr=0.1)
    step = memgraph.compile(module, "64MB", optimizer=optimizer, time_limit=0)
    before = module.weight.detach().clone()
    step(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    assert torch.equal(module.weight, before - 0.1 * 2)
