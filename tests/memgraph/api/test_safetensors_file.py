"""A training state in a safetensors file goes on bit for bit, is what others read, and is whole or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import memgraph
from memgraph.api import safetensors_file
from memgraph.api.training_state import load_state, save_state
from memgraph.errors import StateError
from memgraph.storage.mapped_storage import buffer_slice_of
from tests.support.limits import files_of_at_most

NAME = "run.safetensors"


class Tied(nn.Module):
    """Rows that are read twice, images whose weights lie channels last, a buffer that is a part of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(64, 256)
        self.images = nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)
        self.hidden = nn.Linear(512, 256)
        self.out = nn.Linear(256, 64, bias=False)
        self.out.weight = self.rows.weight
        self.both: Tensor
        self.first: Tensor
        self.register_buffer("both", torch.randn(4, 256))
        self.register_buffer("first", self.both[:2])
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("no one", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        images = self.drop(self.norm(self.images(self.rows(x).view(-1, 4, 8, 8)))).flatten(1)
        out: Tensor = self.out(self.hidden(images) + self.first.sum(0) + self.both[3])
        return out.square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 1e-2}, {"params": rest}]
    return torch.optim.AdamW(groups)


def train(called: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        value = called(torch.randint(64, (16,)))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    return found


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return model


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return memgraph.compile(model, 2_050_000, optimizer=optimizer, time_limit=0)


def trained(make: Callable[..., Any] = plain) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = Tied()
    optimizer = adam(model)
    called = make(model, optimizer)
    torch.manual_seed(1)
    train(called, optimizer, 2)
    return model, optimizer, called


def same(one: nn.Module, other: nn.Module) -> bool:
    there = other.state_dict()
    return all(torch.equal(value, there[name]) for name, value in one.state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize("second", [plain, compiled])
@pytest.mark.parametrize("first", [plain, compiled])
def test_a_training_goes_on_bit_for_bit(tmp_path: Path, first: Callable[..., Any], second: Callable[..., Any]) -> None:
    model, optimizer, called = trained(first)
    save_state(tmp_path / NAME, model, optimizer)
    expected = train(called, optimizer, 3)

    other = Tied()
    fresh = adam(other)
    again = second(other, fresh)
    if second is compiled:
        train(again, fresh, 1)  # what lives on disk by then is loaded there
        states = [tensor for state in fresh.state.values() for tensor in state.values()]
        assert any(buffer_slice_of(tensor) for tensor in (*other.parameters(), *states))
    load_state(tmp_path / NAME, other, fresh)
    assert other.out.weight is other.rows.weight
    assert train(again, fresh, 3) == expected
    assert same(model, other)


PLAIN = """
import sys, torch
from safetensors.torch import load_file, load_model
sys.modules["memgraph"] = None  # whoever imports it fails
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False), torch.nn.BatchNorm1d(8))
model[1].weight = model[0].weight
found = load_file(sys.argv[1])
own = {name: tensor for name, tensor in found.items() if not name.startswith("memgraph.")}
missing, unexpected = model.load_state_dict(own, strict=False)
assert (missing, unexpected) == (["1.weight"], []), (missing, unexpected)  # which is 0.weight
load_model(model, sys.argv[1], strict=False)
torch.set_rng_state(found["memgraph.random"])
print(model[1].weight.sum().item(), found["memgraph.optimizer.state.0.exp_avg"].sum().item(), torch.rand(1).item())
"""


@pytest.mark.long
def test_a_process_without_memgraph_loads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second, nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    save_state(tmp_path / NAME, model, optimizer)
    moment = optimizer.state[first.weight]["exp_avg"]
    expected = f"{first.weight.sum().item()} {moment.sum().item()} {torch.rand(1).item()}\n"
    run = subprocess.run([sys.executable, "-c", PLAIN, str(tmp_path / NAME)], capture_output=True, text=True)
    assert run.stdout == expected, run.stderr


def test_what_is_in_the_file(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    save_state(tmp_path / NAME, model, optimizer)
    found = load_file(tmp_path / NAME)
    own = {name for name in found if not name.startswith("memgraph.")}
    assert own == set(model.state_dict()) - {"out.weight"}
    assert found["memgraph.random"].dtype == torch.uint8
    assert found["memgraph.optimizer.state.0.step"].item() == 2
    with safe_open(tmp_path / NAME, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert "'lr', 0.01" in str(json.loads(metadata["memgraph"]))


def test_all_is_read_as_it_was(tmp_path: Path) -> None:
    tied, images = torch.randn(3), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    state = {
        "model": {"a": tied, "b": tied, "memgraph.c": torch.ones(2, dtype=torch.bfloat16)},
        "c": [torch.zeros(()), (0.9, float("inf")), None, True, {3: images}],
        "d": {"e.f": torch.ones(1), "e": {"f": torch.zeros(1)}},
    }
    safetensors_file.write(state, tmp_path / NAME, tmp_path)
    found = safetensors_file.read(tmp_path / NAME)
    assert found["model"]["a"] is found["model"]["b"]
    assert found["c"][1:4] == [(0.9, float("inf")), None, True]
    assert found["c"][4][3].stride() == images.stride()
    assert torch.equal(found["c"][4][3], images) and torch.equal(found["model"]["b"], tied)
    assert (found["d"]["e.f"].item(), found["d"]["e"]["f"].item()) == (1, 0)
    assert found["model"]["memgraph.c"].dtype == torch.bfloat16
    assert os.listdir(tmp_path) == [NAME]


LIMITED = """
import resource, sys, torch
from memgraph.api import safetensors_file as tensor_file
from memgraph.storage.mapped_storage import TensorSpec, MappedBuffer
forms = [TensorSpec((32, 512, 512), strides, torch.float32) for strides in ((262144, 512, 1), (262144, 1, 512))]
home = MappedBuffer(forms, sys.argv[1])
state = {str(i): home.tensor(i) for i in range(2)}
data = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (data + (16 << 20), -1))
try:
    torch.zeros(32, 512, 512)
except RuntimeError:
    tensor_file.write({"model": state}, sys.argv[1] + "/run.safetensors", sys.argv[1])
    print("written")
"""


@pytest.mark.long
def test_what_lies_on_disk_is_never_whole_in_memory(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True)
    assert run.stdout == "written\n", run.stderr


def test_versions_of_modules_are_kept(tmp_path: Path) -> None:
    saved = nn.utils.spectral_norm(nn.Linear(4, 4)).state_dict()
    safetensors_file.write({"model": saved}, tmp_path / NAME, tmp_path)
    assert safetensors_file.read(tmp_path / NAME)["model"]._metadata == saved._metadata  # type: ignore[attr-defined]


@pytest.mark.parametrize("allowed", [0, 1000, 300_000])
def test_a_save_that_has_no_room_says_so_and_leaves_the_file_before(tmp_path: Path, allowed: int) -> None:
    model, optimizer, _ = trained()
    save_state(tmp_path / NAME, model, optimizer)
    before = (tmp_path / NAME).read_bytes()
    assert len(before) > 300_000
    with files_of_at_most(allowed), pytest.raises(StateError, match=r"run.safetensors can't be written: .*"):
        save_state(tmp_path / NAME, model, optimizer)
    assert (tmp_path / NAME).read_bytes() == before
    assert os.listdir(tmp_path) == [NAME]


def test_what_the_format_does_not_take_is_named(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    model = Extra(2, 2)
    for model.extra in (complex(1), {(1, 2): 3}, torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse()):
        with pytest.raises(StateError, match=r"run.safetensors can't be written: .*name it .pt"):
            save_state(tmp_path / NAME, model)
    assert not os.listdir(tmp_path)
    model.extra = {"seen": [1, 2.5]}
    save_state(tmp_path / NAME, model)
    model.extra = {}
    load_state(tmp_path / NAME, model)
    assert model.extra == {"seen": [1, 2.5]}


def test_what_is_no_state_or_of_another_model_changes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = [f"{name}.safetensors" for name in ("empty", "junk", "cut", "foreign", "fake", "keys", "dtype", "rng")]
    empty, junk, cut, foreign, fake, keys, dtype, rng = (tmp_path / name for name in names)
    empty.write_bytes(b"")
    junk.write_bytes(b"no state at all" * 9)
    save_state(cut, model, optimizer)
    cut.write_bytes(cut.read_bytes()[:-100])
    save_file({"weight": torch.ones(2, 4)}, foreign)
    save_file({"weight": torch.ones(2, 4)}, fake, metadata={"memgraph": '{"items": [["model", {"tensor": "none"}]]}'})
    save_state(keys, nn.Sequential(model), optimizer)
    save_state(dtype, nn.Linear(4, 2).double(), optimizer)
    safetensors_file.write(
        {"memgraph": 1, "model": model.state_dict(), "random": torch.ones(3), "random_cuda": []}, rng, "."
    )
    random = torch.get_rng_state()
    for path, words in {
        empty: "can't be read",
        junk: "can't be read",
        cut: "can't be read",
        foreign: "no training state",
        fake: "can't be read",
        keys: "only in one of them",
        dtype: "float64.* in the file and .*float32.* in the model",
        rng: "another torch",
    }.items():
        with pytest.raises(StateError, match=words):
            load_state(path, model, optimizer)
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / NAME, model, optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state


@pytest.mark.long
def test_the_plans_of_a_compiled_model_are_kept(tmp_path: Path) -> None:
    _, optimizer, called = trained(compiled)
    save_state(tmp_path / NAME, called, optimizer)
    save_state(tmp_path / "run.pt", called, optimizer)
    plans = safetensors_file.read(tmp_path / NAME)["plans"]
    assert plans == torch.load(tmp_path / "run.pt", weights_only=True)["plans"]
    again = memgraph.compile(called._module, 2_050_000, optimizer=optimizer, plan=plans)
    train(again, optimizer, 1)
    assert again.plan.choice.plan == called.plan.choice.plan
