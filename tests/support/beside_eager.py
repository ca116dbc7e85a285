"""Train a random module under a budget beside an eager copy of itself.

    check(random_module(7))    # AssertionError if a bit differs or the budget is broken, with the module's text

Three steps from the same seeds. Outputs, gradients, buffers and the generator's state must be equal, and
measured <= forecast <= budget must hold for every plan.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import memgraph
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from tests.support.random_modules import RandomModule

STEPS = 3
SECONDS = 0.2  # for a plan
TRIES = 4  # budgets: the first one, and those that errors give, also for later signatures


def check(module: RandomModule) -> None:
    """Train a module beside eager.

    Raises:
        AssertionError: they differ, or the budget is broken.
    """
    model, inputs = module.made()
    twin = copy.deepcopy(model)
    expected = _trained(twin, twin, module, inputs)
    compiled, found = _under_budget(model, module, inputs)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert len(ours) == len(theirs), _told(module, f"step {step} makes {len(ours)} tensors, eager's {len(theirs)}")
        wrong = [place for place, pair in enumerate(zip(ours, theirs, strict=True)) if not _is_same(*pair)]
        assert not wrong, _told(module, f"step {step}: of {len(ours)} tensors {wrong} are not eager's")
    for step in compiled.__dict__["_kept"].steps:
        report = step.report
        assert report.peak <= report.budget, _told(module, f"forecast {report.peak} of {report.budget}")
        fits = report.measured is None or report.measured <= report.peak or report.beyond
        assert fits, _told(module, f"measured {report.measured} of {report.peak} forecast")
        within = report.measured is None or report.measured <= report.budget or module.loop == "called twice"
        assert within, _told(module, f"measured {report.measured} of {report.budget}, {report.beyond}")


def _under_budget(
    model: nn.Module, module: RandomModule, inputs: Sequence[Tensor]
) -> tuple[memgraph.CompiledModule, list[list[Tensor]]]:
    """Return the compiled module and the results of its steps; retry with the budget that a BudgetError gives."""
    budget = budget_of(module)
    for _ in range(TRIES):
        ours = copy.deepcopy(model)
        compiled = memgraph.compile(ours, budget, offload=None, time_limit=SECONDS)
        try:
            return compiled, _trained(compiled, ours, module, inputs)
        except memgraph.BudgetError as error:
            assert error.smallest > budget, _told(module, f"{error} of a budget of {budget}")
            budget = error.smallest
    raise AssertionError(_told(module, "no budget that an error gave was enough"))


def budget_of(module: RandomModule) -> int:
    """Return the resident bytes, and a share of the peak of eager's step above them."""
    model, inputs = module.made()
    there = resident_bytes([*model.parameters(), *model.buffers(), inputs[0]])
    _, allocated = measure_peak(lambda: loss_of(model(inputs[0])).backward())
    assert allocated is not None
    return there + int(module.share * allocated.peak)


def _trained(model: nn.Module, owner: nn.Module, module: RandomModule, inputs: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the results of each step. `owner` has the parameters and buffers of `model`."""
    optimizer = torch.optim.SGD(owner.parameters(), lr=0.01)
    torch.manual_seed(module.seed + 1)
    facts = []
    for step in range(STEPS):
        x = inputs[step].clone().requires_grad_(module.loop == "input gradients")
        results = [model(x)]
        if module.loop == "called twice":
            results.append(model(inputs[-1].clone()))
        made = _tensors(results)
        torch.stack([loss_of(result) for result in results]).sum().backward()
        gradients = [tensor.grad for tensor in [*owner.parameters(), x] if tensor.grad is not None]
        facts.append([fact.detach().clone() for fact in (*made, *gradients, *owner.buffers(), torch.get_rng_state())])
        if module.loop == "accumulates" and step == 0:
            continue
        optimizer.step()
        optimizer.zero_grad()
        if module.loop == "eval between":
            owner.eval()
            with torch.no_grad():
                facts[-1] += [tensor.clone() for tensor in _tensors(model(x))]
            owner.train()
    return facts


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def loss_of(result: Any) -> Tensor:
    return _tensors(result)[0]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return True if both have the same bits, except those of a NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    numbers = torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) and torch.equal(one.isnan(), other.isnan())
    return torch.equal(one, other) or numbers


def _told(module: RandomModule, what: str) -> str:
    return f"{what}; seed {module.seed}, {module.loop}, {module.share} of eager's\n{module.source}"
