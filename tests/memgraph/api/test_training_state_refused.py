"""A state that is not this training's is refused before anything is changed, and the training goes on as if it had
never been given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph import StateError
from memgraph.api.training_state import load_state, save_state


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))


def trained(kind: Any = optim.Adam, **options: Any) -> tuple[nn.Module, optim.Optimizer]:
    model = net()
    optimizer = kind(model.parameters(), **options)
    train(model, optimizer, 2)
    return model, optimizer


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> list[Tensor]:
    for _ in range(steps):
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def entry(name: str, value: Any) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        state["optimizer"]["state"][1][name] = value

    return change


def option(name: str, value: Any) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        state["optimizer"]["param_groups"][0][name] = value

    return change


def top(name: str, value: Any) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        state[name] = value

    return change


def lost(state: Any) -> None:
    del state["optimizer"]["state"][0]["exp_avg_sq"]


def unknown(state: Any) -> None:
    del state["optimizer"]


def empty(state: Any) -> None:
    state["model"]["2.bias"] = state["model"]["2.bias"].to("meta")


def strange(state: Any) -> None:
    state["optimizer"]["state"][9] = {}


CHANGES = {
    "shape": (entry("exp_avg", torch.zeros(4)), r"'exp_avg' of parameter 1 is float32\[4\].*float32\[3\]"),
    "type": (entry("exp_avg", torch.zeros(3, dtype=torch.int64)), r"'exp_avg' of parameter 1 is int64\[3\]"),
    "narrower": (entry("exp_avg", torch.zeros(3, dtype=torch.float64)), r"is float64\[3\], which does not fit"),
    "no tensor": (entry("exp_avg", "much"), "'exp_avg' of parameter 1 is str"),
    "step": (entry("step", "much"), "'step' of parameter 1 is str"),
    "lost": (lost, "parameter 0 has no 'exp_avg_sq'"),
    "strange": (strange, "a state of parameter 9, which is in no group"),
    "list": (top("optimizer", {"state": {0: [1]}, "param_groups": []}), "it has 0 groups"),
    "rate": (option("lr", "fast"), "'lr' of its group 0 is str, and has to be float"),
    "betas": (option("betas", (0.9,)), "'betas' of its group 0 is tuple"),
    "random": (top("random", torch.zeros(7, dtype=torch.uint8)), "random generators of another torch"),
    "random values": (top("random", torch.full((5056,), 255, dtype=torch.uint8)), "random generators of another torch"),
    "unknown": (unknown, "has no optimizer's state, and one was given"),
    "empty": (empty, r"'2.bias' is torch.float32 \(2,\) on the meta device in the file"),
    "random kind": (top("random", "dice"), "no training state"),
}


@pytest.mark.parametrize("change, words", CHANGES.values(), ids=CHANGES)
def test_what_would_fail_later_is_refused_now_and_changes_nothing(
    tmp_path: Path, change: Callable[[Any], None], words: str
) -> None:
    save_state(tmp_path / "run.pt", *trained())
    state = torch.load(tmp_path / "run.pt")
    for tensor in state["model"].values():
        tensor.zero_()
    change(state)
    torch.save(state, tmp_path / "run.pt")
    refused(tmp_path / "run.pt", words)


def test_the_state_of_another_optimizer_changes_nothing(tmp_path: Path) -> None:
    save_state(tmp_path / "run.pt", *trained(optim.SGD, lr=0.1, momentum=0.9))
    refused(tmp_path / "run.pt", "is of another optimizer: it is SGD's, and Adam was given")


def refused(path: Path, words: str) -> None:
    expected = train(*trained(), 2)
    model, optimizer = trained()
    groups = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    random = torch.get_rng_state()
    with pytest.raises(StateError, match=words):
        load_state(path, model, optimizer)
    assert torch.equal(random, torch.get_rng_state())
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == groups
    assert all(map(torch.equal, train(model, optimizer, 2), expected))


def test_an_optimizer_or_a_model_that_fails_in_its_own_loading_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    class Strict(optim.Adam):
        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
            if state.get("state"):
                raise KeyError("mine")

    class Model(nn.Linear):
        def set_extra_state(self, state: Any) -> None:
            raise OSError("mine")

        def get_extra_state(self) -> Any:
            return 1

    model = Model(2, 2)
    for kind, error in (Strict, StateError), (optim.Adam, OSError):
        optimizer = kind(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        save_state(tmp_path / "run.pt", model, optimizer)
        optimizer.param_groups[0]["lr"] = 7.0
        before = optimizer.state[model.weight]["exp_avg"]
        with pytest.raises(error, match="mine"):
            load_state(tmp_path / "run.pt", model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 7.0
        assert optimizer.state[model.weight]["exp_avg"] is before


def test_an_optimizer_of_ones_own_is_compared_with_what_it_has(tmp_path: Path) -> None:
    class Own(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)

    model, optimizer = trained(Own)
    save_state(tmp_path / "run.pt", model, optimizer)
    load_state(tmp_path / "run.pt", model, optimizer)
    state = torch.load(tmp_path / "run.pt")
    state["optimizer"]["state"][1]["sum"] = torch.zeros(7)
    torch.save(state, tmp_path / "run.pt")
    with pytest.raises(StateError, match=r"'sum' of parameter 1 is float32\[7\]"):
        load_state(tmp_path / "run.pt", model, optimizer)


@pytest.mark.parametrize("call", [memgraph.save_state, memgraph.load_state])
def test_arguments_of_a_wrong_type_are_named(tmp_path: Path, call: Callable[..., Any]) -> None:
    model, optimizer = trained()
    path = tmp_path / "run.pt"
    save_state(path, model, optimizer)
    for given, words in {
        (None, model, optimizer): "path is None",
        (7, model, optimizer): "path is an int, 7",
        (path, None, optimizer): "model is None",
        (path, optimizer, model): "model is an Adam",
        (path, model, "adam"): "optimizer is a str, 'adam'",
        (path, model, optim.Adam): "optimizer is the class Adam",
    }.items():
        with pytest.raises(TypeError, match=words):
            call(*given)
    with pytest.raises(ValueError, match="path=''"):
        call("", model, optimizer)
