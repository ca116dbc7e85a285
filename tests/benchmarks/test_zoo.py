"""The zoo of stock architectures: what it compares, its verdicts and its table."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo import child
from benchmarks.zoo.architectures import ARCHITECTURES, QUICK
from benchmarks.zoo.facts import different, seed, step_facts, tensors_in
from benchmarks.zoo.row import Row
from benchmarks.zoo.table import markdown, summary
from tests.support.allocator_meter import compiler

ROOT = Path(__file__).parents[2]
FINE = Row("vae", "torch", 0.6, "whole", counted=5, forecast=6, budget=7, seconds=1.5, cpu_seconds=0.5)
ABOUT = {
    "command": "python",
    "date": "today",
    "machine": "two cores",
    "packages": ["torch"],
    "torch": "2",
    "codes": ["a"],
}


@dataclass
class Cache:
    """An object that holds tensors, as those of transformers do."""

    keys: list[torch.Tensor]


def test_there_are_sixty_architectures_of_six_libraries() -> None:
    assert len(ARCHITECTURES) >= 60
    assert len({architecture.library for architecture in ARCHITECTURES.values()}) == 6
    assert set(QUICK) <= set(ARCHITECTURES)


@pytest.mark.parametrize(
    "changes, verdict",
    [
        ({}, "ok"),
        ({"counted": 7}, "over"),
        ({"forecast": 8}, "over"),
        ({"different": ("step 0 loss",), "counted": 7}, "wrong"),
        ({"needs": 7}, "needs"),
        ({"needs": 7, "counted": 8}, "over"),
        ({"state": "refused"}, "refused"),
    ],
)
def test_a_row_has_the_worst_verdict_that_is_true_of_it(changes: dict[str, object], verdict: str) -> None:
    assert replace(FINE, **changes).verdict == verdict  # type: ignore[arg-type]


def test_the_summary_counts_architectures_and_trainings() -> None:
    rows = [FINE, replace(FINE, name="gpt2", state="opaque", seconds=9.0), replace(FINE, name="gcn", state="refused")]
    (text,) = summary([*rows, replace(FINE, share=0.4, counted=8)])
    assert "3 architectures: 66.7% captured (2), 33.3% without opaque parts; 0 wrong and 1 over" in text
    assert "slowest first call 9.0 s (gpt2)" in text


def test_the_table_has_a_line_for_each_architecture_and_a_reason_for_each_failure() -> None:
    page = markdown(
        [FINE, replace(FINE, share=0.4, needs=7), replace(FINE, name="gcn", state="refused", reason="!")], ABOUT
    )
    assert "| vae | torch | whole | 0 | 1.5 | 0.5 | ok 0.00 | needs 0.00 MB |" in page
    assert "- gcn: !" in page


def test_all_that_a_step_makes_or_changes_is_compared() -> None:
    module = torch.nn.BatchNorm1d(2)
    y = module(torch.randn(4, 2))
    y.sum().backward()
    outputs = {"out": y, "cache": Cache([torch.ones(2)])}
    facts = step_facts(module, outputs, y.sum())
    names = {"loss", "output.out", "output.cache.keys.0", "grad weight", "grad bias", "generator"}
    assert names | {"buffer running_mean", "buffer running_var", "buffer num_batches_tracked"} == set(facts)
    assert different(facts, facts) == []
    assert different({**facts, "grad bias": facts["grad bias"] + 1}, facts) == ["grad bias"]
    assert different({"loss": facts["loss"]}, facts) == [name for name in facts if name != "loss"]


def test_nan_is_equal_to_nan_and_to_nothing_else() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert different({"a": nan}, {"a": nan.clone()}) == []
    assert different({"a": nan}, {"a": torch.tensor([1.0, 0.0])}) == ["a"]


def test_what_torch_draws_from_the_system_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "seed", torch.seed)
    drawn = []
    for _ in range(2):
        seed(3)
        drawn.append((torch.seed(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_tensors_in_a_loop_of_references_are_found_once() -> None:
    cache = Cache([torch.ones(1)])
    cache.self = cache  # type: ignore[attr-defined]
    assert [path for path, _ in tensors_in(cache, "c")] == ["c.keys.0"]


def test_a_run_goes_on_with_what_the_same_code_has_not_found(tmp_path: Path) -> None:
    record = zoo.Record(tmp_path, "", quick=False)
    record.add([FINE])
    again = zoo.Record(tmp_path, "", quick=False)
    assert again.done == {("vae", 0.6)} and again.rows == [FINE]
    again.add([replace(FINE, counted=6), replace(FINE, share=0.4)])
    assert [row.counted for row in zoo.Record(tmp_path, "", quick=False).rows] == [6, 5]
    again.code = "other"
    assert again.done == set()


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="the second meter is compiled")
def test_an_architecture_is_trained_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.zoo", "--only", "siamese", "--into", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    rows = json.loads((tmp_path / "zoo.json").read_text())["rows"]
    assert [row["share"] for row in rows] == [1.2, 0.6, 0.4]
    assert all(row["state"] == "whole" and 0 < row["counted"] <= row["forecast"] <= row["budget"] for row in rows)
    assert "siamese" in (tmp_path / "zoo.md").read_text()


def test_nothing_of_an_earlier_try_is_alive_when_a_budget_that_an_error_named_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes would be taken for those of something else, and not be counted."""
    models: list[weakref.ref[nn.Module]] = []

    def tried(architecture: object, row: Row, *_: object) -> Row:
        assert all(model() is None for model in models)
        model = nn.Linear(2, 2)
        models.append(weakref.ref(model))
        if row.budget < 5:
            raise memgraph.BudgetError("too few", row.budget, row.budget + 2)
        return row

    monkeypatch.setattr(child, "_tried", tried)
    meter: Any = None
    row = child._compiled(ARCHITECTURES["gpt2"], Row("gpt2", "transformers", 0.4, budget=2), [], meter)
    assert (row.needs, row.budget, len(models)) == (6, 6, 3)
