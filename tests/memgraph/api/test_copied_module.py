"""A copy of a compiled module, made by copy or by pickle, trains by itself."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from memgraph.planning import search
from tests.support.compare import ROOM, Fact, assert_alike, batch, facts_of, steps, tight
from tests.support.forced_plans import all_given_up
from tests.support.models import Net, Plain


def test_a_copy_before_the_first_call_trains_by_itself() -> None:
    compiled = memgraph.compile(Net(), ROOM)
    copied = copy.deepcopy(compiled)
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in compiled.parameters()}
    steps(copied, 2)
    assert all(p.grad is None for p in compiled.parameters())
    before = [p.detach().clone() for p in compiled.parameters()]
    assert all(map(torch.equal, before, compiled.parameters()))


@tight
def test_a_copy_after_steps_trains_by_itself() -> None:
    def loop(model: Any) -> list[Fact]:
        steps(model, 1)
        copied = copy.deepcopy(model)
        losses = [one(batch(seed=7)).square().mean() for one in (model, copied, model, copied)]
        for loss in losses:
            loss.backward()
        return [*losses, *facts_of(copied)]

    assert_alike(loop, Plain)


def test_a_copy_has_files_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "make_plan", all_given_up)
    compiled: Any = memgraph.compile(Net(), ROOM)
    compiled(batch()).sum().backward()
    copied: Any = copy.deepcopy(compiled)
    copied(batch()).sum().backward()
    rooms = [room for model in (compiled, copied) for step in model._kept.steps for room in step.parts.tier.files]
    assert len(set(rooms)) == len(rooms) == 2


def test_a_pickle_before_the_first_call_trains() -> None:
    restored = pickle.loads(pickle.dumps(memgraph.compile(Net(), ROOM)))
    assert steps(restored, 2)


def test_a_pickle_after_steps_trains() -> None:
    compiled = memgraph.compile(Net(), ROOM)
    steps(compiled, 1)
    assert steps(pickle.loads(pickle.dumps(compiled)), 2)


@pytest.mark.long
@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_no_optimizer_and_trains(how: Any) -> None:
    module = Net()
    compiled = memgraph.compile(module, ROOM, optimizer=torch.optim.AdamW(module.parameters()))
    steps(compiled, 1)
    copied = how(compiled)
    with pytest.raises(AttributeError, match="this is a copy, which has none"):
        _ = copied.optimizer
    assert steps(copied, 2)
    assert compiled.optimizer is not None


def test_an_average_of_the_weights_is_kept_beside_a_module_with_an_optimizer() -> None:
    module = Plain()
    compiled = memgraph.compile(module, ROOM, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    average = torch.optim.swa_utils.AveragedModel(compiled, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn())
    steps(compiled, 2)
    average.update_parameters(compiled)
    with torch.no_grad():
        assert torch.equal(average.eval()(batch()), module.eval()(batch()))


def test_a_shallow_copy_shares_parameters_and_no_attributes() -> None:
    net: Any = nn.Sequential(nn.Linear(4, 4))
    net.scale = 1
    compiled: Any = memgraph.compile(net, 1 << 30)
    copied = copy.copy(compiled)
    copied.scale = 2
    assert (compiled.scale, copied.scale) == (1, 2) and copied[0] is compiled[0]
    x = torch.ones(2, 4)
    compiled(x).sum().backward()
    expected = [2 * p.grad for p in compiled.parameters()]
    copied(x).sum().backward()
    for parameter, grad in zip(net.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)
