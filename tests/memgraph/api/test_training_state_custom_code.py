"""States of modules and optimizers with code of the user's own: what can't be read is not saved, what fails is undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from memgraph import StateError
from memgraph.api.training_state import load_state, save_state


class Chosen:
    """A class that `weights_only` does not read."""


class Extra(nn.Linear):
    """A layer with a state of its own."""

    state: Any = Chosen()

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        pass


class Failing(nn.Linear):
    """A layer that raises when it is loaded, after the layers before it were."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no room for this layer")


class FailingAdam(optim.Adam):
    """An optimizer that raises once it has loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise RuntimeError("no such state")


def trained(model: nn.Module, kind: type[optim.Optimizer] = optim.Adam, **options: Any) -> optim.Optimizer:
    optimizer = kind(model.parameters(), **options)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def values(model: nn.Module, optimizer: optim.Optimizer) -> tuple[Any, Any]:
    return copy.deepcopy(([*model.parameters()], optimizer.state_dict()))


def equal(a: Any, b: Any) -> bool:
    (a_tensors, a_state), (b_tensors, b_state) = a, b
    same = all(map(torch.equal, a_tensors, b_tensors))
    return same and str(a_state) == str(b_state)


@pytest.mark.parametrize("name", ["run.pt", "run.safetensors"])
def test_a_rate_of_numpy_is_loaded_again(tmp_path: Path, name: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = trained(model, lr=0.5)
    optimizer.param_groups[0]["lr"] = np.float64(0.1)
    save_state(tmp_path / name, model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.7
    load_state(tmp_path / name, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("state, text", [(Chosen(), "Chosen in it"), (lambda: 1, "lambda")], ids=["class", "lambda"])
def test_what_could_not_be_read_is_not_saved(tmp_path: Path, state: Any, text: str) -> None:
    model, path = nn.Sequential(Extra(3, 3)), tmp_path / "run.pt"
    model[0].state = state
    path.write_bytes(b"earlier")
    with pytest.raises(StateError, match=text):
        save_state(path, model)
    assert ([*tmp_path.iterdir()], path.read_bytes()) == ([path], b"earlier")


def late() -> tuple[nn.Module, optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 3), Failing(3, 3))
    return model, trained(model)


def own_optimizer() -> tuple[nn.Module, optim.Optimizer]:
    model = nn.Linear(3, 3)
    return model, trained(model, FailingAdam)


def hooked() -> tuple[nn.Module, optim.Optimizer]:
    def fail(module: nn.Module, keys: Any) -> None:
        raise RuntimeError("not these keys")

    model = nn.Linear(3, 3)
    model.register_load_state_dict_post_hook(fail)
    return model, trained(model)


@pytest.mark.parametrize("make", [late, own_optimizer, hooked], ids=["late layer", "optimizer", "hook"])
def test_a_load_that_fails_changes_nothing(
    tmp_path: Path, make: Callable[[], tuple[nn.Module, optim.Optimizer]]
) -> None:
    model, optimizer = make()
    save_state(tmp_path / "run.pt", model, optimizer)
    _train_on(model, optimizer)
    before, random = values(model, optimizer), torch.get_rng_state()
    with pytest.raises(StateError, match="nothing was changed"):
        load_state(tmp_path / "run.pt", model, optimizer)
    assert equal(values(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_hook_that_converts_nothing_keeps_the_checks(tmp_path: Path) -> None:
    model, calls = nn.Linear(3, 3), list[Any]()
    save_state(tmp_path / "run.pt", model, trained(model))
    other = trained(model, optim.SGD, lr=0.1, momentum=0.9)
    other.register_load_state_dict_pre_hook(lambda *each: calls.append(each))
    before = values(model, other)
    with pytest.raises(StateError, match="of another optimizer than SGD"):
        load_state(tmp_path / "run.pt", model, other)
    assert equal(values(model, other), before)
    assert len(calls) == 1


def test_a_hook_that_converts_runs_once(tmp_path: Path) -> None:
    model, calls = nn.Linear(3, 3), list[Any]()
    save_state(tmp_path / "run.pt", model, trained(model, optim.SGD, lr=0.1, momentum=0.9))
    other = trained(model, optim.SGD, lr=0.2, momentum=0.9)

    def double(optimizer: optim.Optimizer, state: Any) -> Any:
        calls.append(state)
        groups = [{**group, "lr": 2 * group["lr"]} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    other.register_load_state_dict_pre_hook(double)
    load_state(tmp_path / "run.pt", model, other)
    assert (other.param_groups[0]["lr"], len(calls), len(other._optimizer_load_state_dict_pre_hooks)) == (0.2, 1, 1)


def _train_on(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [*model.parameters()]
