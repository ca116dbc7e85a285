"""A compiled module is the module it was made of: its parameters, its state_dict, its modes, its parts."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from tests.support.compare import ROOM, Fact, assert_alike, batch, steps, tight
from tests.support.models import Net, Running


def test_state_dict_has_the_same_keys_and_the_very_same_tensors() -> None:
    module = Net()
    compiled = memgraph.compile(module, ROOM)
    theirs, ours = module.state_dict(keep_vars=True), compiled.state_dict(keep_vars=True)
    assert list(theirs) == list(ours)
    assert all(ours[key] is theirs[key] for key in theirs)


def test_named_parameters_buffers_and_modules_are_the_same_objects() -> None:
    module = Net()
    compiled = memgraph.compile(module, ROOM)
    assert [(n, id(p)) for n, p in compiled.named_parameters()] == [(n, id(p)) for n, p in module.named_parameters()]
    assert [(n, id(b)) for n, b in compiled.named_buffers()] == [(n, id(b)) for n, b in module.named_buffers()]
    assert [(n, id(c)) for n, c in compiled.named_children()] == [(n, id(c)) for n, c in module.named_children()]
    assert isinstance(compiled, nn.Module)


@tight
def test_load_state_dict_after_a_step_takes_effect() -> None:
    torch.manual_seed(9)
    other = {key: value + 1 for key, value in Running().state_dict().items()}

    def loop(model: Any) -> list[Fact]:
        first = steps(model, 1)
        assert not model.load_state_dict(other).missing_keys
        return first + steps(model, 1)

    assert_alike(loop, Running)


def test_what_is_saved_of_the_compiled_module_loads_into_the_plain_one() -> None:
    compiled = memgraph.compile(Net(), ROOM)
    steps(compiled)
    file = io.BytesIO()
    torch.save(compiled.state_dict(), file)
    file.seek(0)
    plain = Net()
    plain.load_state_dict(torch.load(file))
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), compiled.state_dict().values(), strict=True)
    )


@pytest.mark.long
@tight
def test_train_and_eval_switch_back_and_forth() -> None:
    def loop(model: Any) -> list[Fact]:
        found = steps(model, 1)
        assert model.eval() is model
        assert not any(part.training for part in model.modules())
        found += [model(batch()), *steps(model, 1)]
        model.train()
        model.norm.eval()
        return found + steps(model, 1)

    assert_alike(loop, Running)


@tight
def test_another_dtype_is_planned_separately() -> None:
    def loop(model: Any) -> list[Fact]:
        found = steps(model, 1)
        model.to(torch.float64)
        loss = model(batch().double()).square().mean()
        loss.backward()
        return [*found, loss]

    assert_alike(loop, Running)


def test_a_replaced_submodule_is_planned_again() -> None:
    def loop(model: Any) -> list[Fact]:
        found = steps(model, 1)
        model.first = nn.Linear(8, 8, bias=False)
        found += steps(model, 1)
        model.first.weight = model.second.weight
        return found + steps(model, 1)

    assert_alike(loop)


def test_a_parameter_that_is_replaced_is_read_and_trained() -> None:
    def loop(model: Any) -> list[Fact]:
        found = steps(model, 1)
        model.first.weight = nn.Parameter(torch.full((8, 8), 0.25))
        return found + steps(model, 2)

    assert_alike(loop)


@tight
@pytest.mark.filterwarnings("error:The .grad attribute of a Tensor that is not a leaf")
def test_functional_call_puts_other_tensors_in_the_place_of_parameters() -> None:
    def loop(model: Any) -> list[Fact]:
        seeds = {name: torch.full_like(p, 0.1, requires_grad=True) for name, p in model.named_parameters()}
        others = {name: seed.sin() for name, seed in seeds.items()}
        loss = torch.func.functional_call(model, others, (batch(),)).square().sum()
        loss.backward()
        return [loss, *(seed.grad for seed in seeds.values())]

    assert_alike(loop)


def test_what_is_shown_in_a_notebook_is_short() -> None:
    layer = nn.Linear(8, 8)
    compiled = memgraph.compile(nn.Sequential(*[layer for _ in range(50)]), "1GB")
    assert repr(compiled) == f"CompiledModule({compiled._module!r}, budget='1GB')"
    compiled(torch.randn(4, 8)).sum().backward()
    saved = memgraph.SavedPlan.from_json(compiled.plan.to_json())
    sweep = memgraph.sweep(layer, torch.randn(4, 8), time_limit=0)
    shown = [repr(each) for each in (compiled.plan, saved, sweep, compiled.plan.forecast.trace)]
    assert all(len(text) < 200 for text in shown), shown
    assert shown[0].startswith("<Report: fits: forecast ")
