"""A training of one process is saved to a folder, and goes on bit for bit, alone or on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader as dcp

import memgraph
from memgraph import StateError
from tests.memgraph.oss.checkpoint.test_full_state import refusal
from tests.support.ranks import on_ranks

ADAM: dict[str, Any] = {"lr": 1e-2, "foreach": False}


def made(
    kind: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(0.5), nn.Linear(10, 3))
    return model, kind(model.parameters(), **(options or ADAM))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    """Train on the same numbers in each process; return parameters and buffers."""
    for _ in range(steps):
        x = torch.randn(8, 6)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def spoiled(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def test_a_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = made()
    trained(model, optimizer, 2)
    memgraph.save_sharded(tmp_path / "run", model, optimizer)
    trained(model, optimizer, 1)
    memgraph.save_sharded(tmp_path / "run", model, optimizer)  # is replaced
    wanted = trained(model, optimizer, 2)
    other, its_optimizer = made()
    spoiled(other)
    memgraph.load_sharded(tmp_path / "run", other, its_optimizer)
    assert all(map(torch.equal, trained(other, its_optimizer, 2), wanted))
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_states_of_a_compiled_module_are_where_its_budget_has_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.randn(4, 256)
    needed = memgraph.plan(model, x, budget="1GB", optimizer=optimizer).peak

    def step(compiled: nn.Module) -> list[Tensor]:
        compiled(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in compiled.parameters()]

    compiled = memgraph.compile(model, int(0.6 * needed), optimizer=optimizer)
    step(compiled)
    memgraph.save_sharded(tmp_path / "run", compiled, optimizer)
    wanted = [step(compiled) for _ in range(2)]
    memgraph.load_sharded(tmp_path / "run", compiled, optimizer)
    found = [step(compiled) for _ in range(2)]
    assert all(all(map(torch.equal, *pair)) for pair in zip(found, wanted, strict=True))
    assert compiled.plan.measured is not None and compiled.plan.measured <= compiled.plan.budget


def test_a_folder_is_read_without_memgraph(tmp_path: Path) -> None:
    model, optimizer = made()
    trained(model, optimizer, 1)
    memgraph.save_sharded(tmp_path / "run", model, optimizer)
    read = {"model": {name: torch.empty_like(value) for name, value in model.state_dict().items()}}
    dcp.load(read, checkpoint_id=tmp_path / "run", no_dist=True)
    assert all(torch.equal(read["model"][name], value) for name, value in model.state_dict().items())


def test_a_model_alone_is_saved_and_loaded(tmp_path: Path) -> None:
    model, optimizer = made()
    memgraph.save_sharded(tmp_path / "alone", model)
    memgraph.save_sharded(tmp_path / "both", model, optimizer)
    for name in ("alone", "both"):
        other, _ = made()
        spoiled(other)
        memgraph.load_sharded(tmp_path / name, other)
        assert all(map(torch.equal, other.parameters(), model.parameters()))


class Counted(nn.Linear):
    calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def test_state_that_is_no_tensor_is_given_back(tmp_path: Path) -> None:
    module, other = Counted(4, 4), Counted(4, 4)
    module.calls = 7
    memgraph.save_sharded(tmp_path / "run", module)
    memgraph.load_sharded(tmp_path / "run", other)
    assert other.calls == 7
    pipe = memgraph.pipeline(Counted(4, 4), "1GB", 1, loss=lambda y: y.square().mean())
    pipe.prepare(torch.ones(2, 4))
    pipe.load_sharded(tmp_path / "run")
    assert pipe.module._module.calls == 7  # type: ignore[union-attr]


def test_state_that_would_come_back_otherwise_and_a_model_without_values_are_refused(tmp_path: Path) -> None:
    module = Counted(4, 4)
    module.calls = {3: 4}  # type: ignore[assignment]
    assert "'_extra_state' is a dict" in refusal(StateError, memgraph.save_sharded, tmp_path / "run", module)
    meta = nn.Linear(4, 4, device="meta")
    for call in (memgraph.save_sharded, memgraph.load_sharded):
        assert "is on the meta device" in refusal(StateError, call, tmp_path / "run", meta)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("state", {3: 1.0}, "state.0.own of the optimizer is an object of dict with the keys [3]"),
        ("state", {}, "state.0.own of the optimizer is an object of dict with the keys []"),
        (
            "state",
            {"inner": [{1: torch.ones(2)}]},
            "state.0.own.inner.0 of the optimizer is an object of dict with the keys [1]",
        ),
        ("state", {0: torch.ones(2)}, "state.0.own of the optimizer is an object of dict with the keys [0]"),
        ("group", numpy.ones(2), "param_groups.0.own of the optimizer is an object of ndarray"),
        ("group", nn.Linear, "param_groups.0.own of the optimizer is an object of type"),
        ("group", {"a": {"b": 1}}, ""),
        ("group", ({3: 4}, torch.ones(2)), ""),
        ("group", [1, 2.0, None, [True]], ""),
    ],
    ids=str,
)
def test_a_state_comes_back_as_it_is_or_is_refused(tmp_path: Path, place: str, value: Any, said: str) -> None:
    model, optimizer = made()
    trained(model, optimizer, 1)
    memgraph.save_sharded(tmp_path / "run", model, optimizer)

    def holder(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        weight = optimizer.param_groups[0]["params"][0]
        return optimizer.state[weight] if place == "state" else optimizer.param_groups[0]

    holder(optimizer)["own"] = value
    if said:
        assert said in refusal(StateError, memgraph.save_sharded, tmp_path / "run", model, optimizer)
        memgraph.load_sharded(tmp_path / "run", *made())  # the old folder is there
        return
    memgraph.save_sharded(tmp_path / "run", model, optimizer)
    other, its_optimizer = made()
    memgraph.load_sharded(tmp_path / "run", other, its_optimizer)
    found = holder(its_optimizer)["own"]
    assert type(found) is type(value) and str(found) == str(value)


def test_a_folder_with_other_files_is_not_replaced_and_one_without_checksums_is_not_loaded(tmp_path: Path) -> None:
    model, optimizer = made()
    run = tmp_path / "run"
    memgraph.save_sharded(run, model, optimizer)
    (run / "config.json").write_text("{}")
    assert "config.json is no part of the checkpoint" in refusal(
        StateError, memgraph.save_sharded, run, model, optimizer
    )
    memgraph.load_sharded(run, model, optimizer)
    (run / "__0.crc32").unlink()
    assert "__0.crc32 is missing" in refusal(StateError, memgraph.load_sharded, run, model, optimizer)


def test_a_buffer_whose_elements_share_memory_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("scale", torch.ones(1).expand(3))
    memgraph.save_sharded(tmp_path / "run", model)
    assert "'scale' has elements that share memory" in refusal(
        StateError, memgraph.load_sharded, tmp_path / "run", model
    )


def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model, optimizer = made()
    trained(model, optimizer, 1)
    memgraph.save_sharded(tmp_path / "run", model, optimizer)
    memgraph.save_sharded(tmp_path / "alone", model)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    cases = {
        "it is Adam's, and SGD was given": (model, torch.optim.SGD(model.parameters(), lr=0.1)),
        "is only in one of them": (nn.Linear(6, 10), made()[1]),
        "it has 1 group, and the optimizer has 2": (
            model,
            torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[3].parameters()}]),  # type: ignore[index]
        ),
    }
    for text, given in cases.items():
        assert text in refusal(StateError, memgraph.load_sharded, tmp_path / "run", *given)
    assert "has no 'optimizer' in it" in refusal(
        StateError, memgraph.load_sharded, tmp_path / "alone", model, optimizer
    )
    part = next((tmp_path / "run").glob("*.distcp"))
    damaged = bytearray(part.read_bytes())
    damaged[-100] ^= 1
    part.write_bytes(damaged)
    assert "was damaged since it was written" in refusal(
        StateError, memgraph.load_sharded, tmp_path / "run", model, optimizer
    )
    assert all(map(torch.equal, model.state_dict().values(), before))


def _sharded(rank: int, folder: Path, saves: bool) -> list[list[float]]:
    model, _ = made()
    optimizer = memgraph.OSS(model.parameters(), torch.optim.Adam, gradients="same", **ADAM)
    if saves:
        trained(model, optimizer, 2)
        memgraph.save_sharded(folder, model, optimizer)
    else:
        spoiled(model)
        memgraph.load_sharded(folder, model, optimizer)
    torch.manual_seed(1)  # a rank that the saved training did not have keeps its own
    return numbers(trained(model, optimizer, 2))


def numbers(tensors: list[Tensor]) -> list[list[float]]:
    return [tensor.tolist() for tensor in tensors]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run on as many threads as a rank: sums in parts have other last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_one_process_goes_on_with_what_several_ranks_saved_and_they_with_its_own(tmp_path: Path) -> None:
    wanted = on_ranks(3, _sharded, tmp_path / "ranks", True)[0]
    model, optimizer = made()
    spoiled(model)
    memgraph.load_sharded(tmp_path / "ranks", model, optimizer)
    memgraph.save_sharded(tmp_path / "alone", model, optimizer)
    torch.manual_seed(1)
    assert numbers(trained(model, optimizer, 2)) == wanted
    assert on_ranks(2, _sharded, tmp_path / "alone", False)[0] == wanted
