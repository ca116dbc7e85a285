"""The state of another class of optimizers is refused, although torch would take it; that of the same class is not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import memgraph
from memgraph import StateError
from memgraph.api.training_state import load_state, save_state
from tests.memgraph.oss.checkpoint.test_full_state import refusal
from tests.support.ranks import on_ranks

NAMES = pytest.mark.parametrize("name", ["run.pt", "run.safetensors"])


def trained(kind: Any, lr: float = 1e-3, **options: Any) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=lr, **options)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def refused(path: Path, words: str) -> None:
    model, optimizer = trained(optim.AdamW)
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    weight, average = model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"].clone()
    with pytest.raises(StateError, match=words):
        load_state(path, model, optimizer)
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == options
    assert torch.equal(weight, model.weight) and torch.equal(average, optimizer.state[model.weight]["exp_avg"])


@NAMES
@pytest.mark.parametrize("kind", [optim.NAdam, optim.Adam, optim.RAdam, optim.Adamax], ids=lambda kind: kind.__name__)
def test_a_state_of_another_class_is_refused_and_changes_nothing(tmp_path: Path, name: str, kind: Any) -> None:
    save_state(tmp_path / name, *trained(kind, 0.5))
    refused(tmp_path / name, f"is of another optimizer: it is {kind.__name__}'s, and AdamW was given")


def nameless(path: Path, optimizer: Any) -> Path:
    """A file as it was before the class was written down."""
    save_state(path, *optimizer)
    state = torch.load(path)
    del state["optimizer_class"]
    torch.save(state, path)
    return path


def test_options_that_the_class_has_not_are_refused_without_its_name(tmp_path: Path) -> None:
    refused(
        nameless(tmp_path / "run.pt", trained(optim.NAdam)), "its group 0 has 'momentum_decay', so it is of another"
    )


class Mine(optim.AdamW):
    pass


@NAMES
@pytest.mark.parametrize("kind", [optim.AdamW, Mine])
def test_a_state_of_the_same_class_loads_with_what_a_scheduler_and_the_user_have_added(
    tmp_path: Path, name: str, kind: Any
) -> None:
    model, optimizer = trained(kind, 0.5)
    optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.7, total_steps=9)
    optimizer.param_groups[0]["whose"] = "mine"
    save_state(tmp_path / name, model, optimizer)
    other, fresh = trained(optim.AdamW, foreach=False)
    load_state(tmp_path / name, other, fresh)
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert fresh.param_groups[0]["whose"] == "mine"


def test_a_file_without_the_name_of_the_class_loads(tmp_path: Path) -> None:
    load_state(nameless(tmp_path / "run.pt", trained(optim.AdamW, 0.5)), *(own := trained(optim.AdamW)))
    assert own[1].param_groups[0]["lr"] == 0.5


def _sharded(rank: int, folder: str) -> None:
    def spread(kind: Any, lr: float = 1e-3) -> tuple[nn.Module, Any]:
        return trained(lambda parameters, **options: memgraph.OSS(parameters, kind, **options), lr)

    place = Path(folder)
    for kind in (optim.Adam, optim.AdamW):
        model, optimizer = spread(kind, 0.5)
        memgraph.save_sharded(place / kind.__name__, model, optimizer)
        optimizer.consolidate_state_dict(None)
        save_state(place / f"{kind.__name__}{rank}.pt", model, optimizer)
        save_state(place / f"plain {kind.__name__}{rank}.pt", *trained(kind, 0.5))
    for load, names in ((memgraph.load_sharded, ["{}"]), (load_state, [f"{{}}{rank}.pt", f"plain {{}}{rank}.pt"])):
        for name in names:
            model, optimizer = spread(optim.AdamW)
            said = refusal(StateError, load, place / name.format("Adam"), model, optimizer)
            assert "it is Adam's, and AdamW was given" in said
            assert optimizer.param_groups[0]["lr"] == 1e-3
            load(place / name.format("AdamW"), model, optimizer)
            assert optimizer.param_groups[0]["lr"] == 0.5
    load_state(place / f"AdamW{rank}.pt", *(plain := trained(optim.AdamW)))
    assert plain[1].param_groups[0]["lr"] == 0.5


@pytest.mark.long
def test_a_sharded_optimizer_takes_the_states_of_its_class_and_no_others() -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(2, _sharded, folder)
