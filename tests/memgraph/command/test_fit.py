"""`memgraph fit`, with its exit codes, on tiny configurations and factories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memgraph
from memgraph.command.app import main
from memgraph.fit.device_profile import FOLDER

FACTORY = """
import torch
from torch import nn

def setup(batch=4):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)])
    return {"model": model, "args": (torch.randn(batch, 64),), "kwargs": {"target": torch.randn(batch, 64)},
            "loss": nn.functional.mse_loss, "optimizer": torch.optim.AdamW(model.parameters())}

def real():
    with torch.device("cpu"):
        return nn.Linear(8, 8), torch.randn(4, 8)
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 256}
    transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path)
    return str(tmp_path / "config.json")


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "factory_of_fit.py").write_text(FACTORY)
    return f"{tmp_path}/factory_of_fit.py"


def _found(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_a_configuration_is_planned_for_a_device_that_is_not_here(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    given = ["fit", config, "--device", "h200", "--budget", "1GB", "--batch", "2", "--seq", "64"]
    assert main([*given, "--json", "-o", str(plan)]) == 0
    found = _found(capsys)
    assert (found["batch"], found["seq"], found["device"], found["budget"]) == (2, 64, "h200", 10**9)
    assert found["peak"] == memgraph.Report.from_json(plan.read_text()).peak <= 10**9
    assert sum(found["at_the_peak"].values()) == found["peak"]
    assert main(given) == 0
    assert "NVIDIA H200 SXM" in (text := capsys.readouterr().out)
    assert "fits: forecast" in text and "not counted: " in text


@pytest.mark.long
def test_the_largest_batch_fits_and_the_next_does_not(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["fit", config, "--device", "h200", "--budget", "150MB", "--seq", "64", "--json"]
    assert main([*given, "--max", "batch"]) == 0
    found = _found(capsys)
    largest = found["largest"]
    assert largest["next"] == largest["batch"] + 1 == found["batch"] + 1
    assert found["peak"] <= 150_000_000 < largest["next_nbytes"]


@pytest.mark.long
def test_the_largest_length_ends_where_the_model_does(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", config, "--device", "h200", "--max", "seq", "--seq", "64"]) == 0
    assert "largest seq: 256; the model takes no more" in capsys.readouterr().out


@pytest.mark.long
def test_a_model_that_does_not_fit_is_exit_code_3(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--max", "batch"]):
        assert main(["fit", f"{factory}:setup", "--device", "l4", "--budget", "19MB", *more]) == 3
        assert "the smallest budget for which a plan was found is" in capsys.readouterr().err


@pytest.mark.long
def test_factories_are_called_on_meta_with_their_sizes(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", f"{factory}:setup", "--device", "l4", "--budget", "40MB", "--max", "batch", "--json"]) == 0
    assert _found(capsys)["largest"]["batch"] > 4


def test_factories_may_make_real_tensors(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", f"{factory}:real", "--device", "t4", "--json"]) == 0
    assert _found(capsys)["parameters"] == 72
    assert main(["fit", f"{factory}:real", "--device", "t4", "--max", "batch"]) == 2
    assert "--max batch would change nothing, since the factory takes no" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--device", "h300"], "h100"),
        (["--device", "l4", "--batch", "0"], "--batch"),
        (["--device", "l4", "--budget", "25GB"], "NVIDIA L4 has 24000000000"),
        (["--device", "l4", "--budget", "many"], "can't be read"),
        (["--device", "l4", "--step", "5"], "--step is the step of --max"),
    ],
)
def test_wrong_usage_says_what_was_wanted(
    given: list[str], message: str, factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", f"{factory}:setup", *given]) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_an_unknown_configuration_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["fit", "no-such-owner/no-such-model", "--device", "l4"]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not-there.json", "there is no file or folder"),
        ("no/such/folder", "there is no file or folder"),
        ("./not-there", "there is no file or folder"),
        ("else.json", "holds no configuration of a model"),
        ("cut.json", "holds no configuration of a model"),
        ("folder", "holds no configuration of a model"),
    ],
)
def test_a_path_is_not_looked_up_on_the_network(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "else.json").write_text('{"a": 1}')
    (tmp_path / "cut.json").write_text('{"model_type": "gp')
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    asked: list[object] = []
    monkeypatch.setattr("socket.socket.connect", lambda _, address: asked.append(address))
    assert main(["fit", name, "--device", "l4"]) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split()) and not asked


@pytest.mark.long
def test_doctor_writes_the_profile_of_this_machine(
    tmp_path: Path, factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cpu.json"
    assert main(["doctor", "--spill-dir", str(tmp_path), "--profile", str(file), "--json"]) == 0
    capsys.readouterr()
    assert main(["fit", f"{factory}:setup", "--device", str(file), "--budget", "50MB", "--json"]) == 0
    assert _found(capsys)["device"] == "cpu"


def test_what_the_device_holds_is_said_and_decides(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["fit", f"{factory}:setup", "--device", "l4", "--batch", "256"]
    assert main([*given, "--json"]) == 0
    assert (found := _found(capsys))["held"] > found["peak"]
    assert main(given) == 0
    text = capsys.readouterr().out
    assert "torch's allocator would hold " in text and "GB that the device has" in text and "warning" not in text


@pytest.mark.long
def test_a_step_that_takes_twice_as_long_is_no_fit_without_a_word(
    factory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = json.loads((FOLDER / "l4.json").read_text())
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps({**device, "libraries": 0, "link": {"out": 1e6, "back": 1e6}}))
    given = ["fit", f"{factory}:setup", "--device", str(slow), "--batch", "256", "--time-limit", "5"]
    assert main([*given, "--budget", "2MB"]) == 0
    assert "warning: it fits for " in " ".join(capsys.readouterr().out.split())


def test_a_size_that_the_factory_does_not_take_is_refused_and_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fixed.py").write_text(
        "import torch\ndef setup():\n    return torch.nn.Linear(8, 8), torch.empty(4, 8)\n"
    )
    target = ["fit", f"{tmp_path / 'fixed.py'}:setup", "--device", "l4"]
    assert main([*target, "--batch", "64", "--seq", "9"]) == 2
    assert "--batch and --seq would change nothing" in capsys.readouterr().err.replace("\n", " ")
    assert main(target) == 0
    assert "parameters; NVIDIA L4" in capsys.readouterr().out


def test_a_size_that_is_the_configurations_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    transformers.ViTConfig(**small, image_size=16, patch_size=8).save_pretrained(tmp_path)
    for option in (["--seq", "64"], ["--max", "seq"]):
        assert main(["fit", str(tmp_path), "--device", "l4", *option]) == 2
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert (
            f"{' '.join(option[: 2 if option[0] == '--max' else 1])} would change nothing, since the sizes of" in said
        )
