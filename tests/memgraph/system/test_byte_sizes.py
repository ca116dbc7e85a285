"""A budget is parsed or refused with a hint; if it is too small, the error names one that works."""

from __future__ import annotations

import math
import pickle
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import memgraph
import passes
from memgraph.profile import op_profiler
from memgraph.profile.link_bandwidth import Link
from memgraph.profile.machine_profile import CopyOverhead
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.system.byte_sizes import UNITS, WHOLE, budget_nbytes
from memgraph.system.device import device_of, memory_nbytes, unused_nbytes
from tests.support.models import batch, net

CPU = torch.device("cpu")
MEMORY = memory_nbytes(CPU)
ROOM = "1GB"


def smallest_of(module: nn.Module, *args: Tensor, **wishes: Any) -> memgraph.BudgetError:
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(module, *args, budget=100, **wishes)
    return caught.value


@cache
def too_small() -> memgraph.BudgetError:
    """Return the error of the usual call."""
    return smallest_of(net(), batch())


# --- what a budget means


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8000", 8000),
        ("500B", 500),
        ("1KB", 1000),
        ("1 KiB", 1024),
        ("500MB", 500 * 10**6),
        ("500 mb", 500 * 10**6),
        (" 2MiB ", 2 << 20),
        ("1.5MB", 1_500_000),
        ("0.5GiB", 1 << 29),
        ("0.1GB", 10**8),
        ("1GB", 10**9),
        ("1gib", 1 << 30),
        (12345, 12345),
        (1, 1),
        (MEMORY, MEMORY),
        (1.0, MEMORY),
        (0.5, MEMORY // 2),
    ],
)
def test_a_budget_is_so_many_bytes(text: str | int | float, nbytes: int) -> None:
    assert budget_nbytes(text, CPU) == nbytes


@given(
    st.integers(1, 999),
    st.sampled_from(["", "B", "KB", "MB", "KiB", "MiB"]),
    st.booleans(),
    st.sampled_from(["", " ", "  "]),
)
def test_round_numbers_are_exact_however_they_are_written(count: int, unit: str, upper: bool, space: str) -> None:
    text = f"{count}{space}{unit.upper() if upper else unit.lower()}"
    assert budget_nbytes(text, CPU) == count * UNITS[unit.upper()]


@given(st.integers(0, 99), st.integers(1, 99), st.sampled_from(["MB", "MiB"]))
def test_decimals_are_right_to_the_byte(whole: int, hundredths: int, unit: str) -> None:
    nbytes = (whole * 100 + hundredths) * UNITS[unit.upper()] // 100
    assert budget_nbytes(f"{whole}.{hundredths:02}{unit}", CPU) in (nbytes, nbytes - 1)  # never more than was said


@given(st.floats(1e-6, 1.0))
def test_a_share_is_never_more_than_that_share(share: float) -> None:
    assert 0 < budget_nbytes(share, CPU) <= share * MEMORY


def test_none_is_what_is_free_and_what_the_model_has_already() -> None:
    nbytes = budget_nbytes(None, CPU, resident=12345)
    assert abs(nbytes - 12345 - unused_nbytes(CPU)) < MEMORY // 10
    assert 0 < unused_nbytes(CPU) <= MEMORY
    compiled = memgraph.compile(net())
    compiled(batch()).sum().backward()
    assert 0 < compiled.plan.budget <= 2 * MEMORY
    assert not compiled.plan.plan


@pytest.mark.parametrize(
    "text",
    ["", "GB", "8 GBs", "8XB", "eight", "8,5GB", "8GB 1", "-8GB", "1e9", "0x10", "nan", "inf", "½GB", "8 G B", "."],
)
def test_what_can_not_be_read_is_refused_with_the_forms_that_can(text: str) -> None:
    with pytest.raises(ValueError, match=r'write e\.g\. "8GB"') as caught:
        memgraph.compile(net(), text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("0.5", "a share is given as a float, 0.5 without quotes"),
        ("50%", "a share is given as a float, 0.5 without quotes"),
        ("50 %", "a share is given as a float, 0.5 without quotes"),
        ("150%", WHOLE),
        ("1000.5", WHOLE),
        ("8G", 'the unit is "GB" or "GiB"'),
        ("8m", 'the unit is "MB" or "MiB"'),
        ("8 K", 'the unit is "KB" or "KiB"'),
        ("8Gb", '"Gb" are bits; the unit of bytes is "GB"'),
        ("8Mib", '"Mib" are bits; the unit of bytes is "MiB"'),
    ],
)
def test_a_budget_that_is_nearly_right_is_refused_with_what_is_likely_meant(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"budget={text!r} can't be read: {hint}; ")):
        budget_nbytes(text, CPU)


@pytest.mark.parametrize(
    "budget", [0, -1, -(10**12), "0", "0GB", "0.0MB", 0.0, -0.5, 1.0000001, 8e9, math.nan, math.inf, -math.inf]
)
def test_what_is_not_positive_or_no_share_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"budget={budget!r}")):
        memgraph.compile(net(), budget)


@pytest.mark.parametrize("budget", [True, False, [1], b"8GB", (1,), 8j, torch.tensor(8), object()])
def test_other_types_are_refused(budget: Any) -> None:
    with pytest.raises(TypeError, match=f"budget is an? {type(budget).__name__}"):
        memgraph.compile(net(), budget)


@pytest.mark.parametrize("budget", [MEMORY + 1, "9999TB", 10**30])
def test_more_than_the_machine_has_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match=rf"but cpu has {MEMORY}"):
        memgraph.compile(net(), budget)


def test_a_number_without_end_is_refused_like_any_other() -> None:
    with pytest.raises(ValueError, match="budget="):
        memgraph.compile(net(), "9" * 400 + ".5GB")


def test_what_is_not_a_number_is_said_to_be_none() -> None:
    with pytest.raises(ValueError, match="budget=nan is not a number"):
        memgraph.compile(net(), math.nan)


# --- the other arguments


@pytest.mark.parametrize("offload", ["auto", "disk", None])
def test_a_folder_that_is_not_there_is_refused_at_once(offload: str | None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(memgraph.SpillError, match=f"{name}: it is not a folder"):
            memgraph.compile(net(), ROOM, spill_dir=tmp_path / name, offload=offload)


def test_an_input_on_another_device_is_refused_with_the_device_that_is_wanted() -> None:
    compiled = memgraph.compile(net(), ROOM)
    compiled(batch())
    with pytest.raises(memgraph.CaptureError, match="an input is on meta, but the model is on cpu"):
        compiled(batch().to("meta"))


def test_a_compiled_module_is_refused() -> None:
    with pytest.raises(TypeError, match="compiled already"):
        memgraph.compile(memgraph.compile(net(), ROOM), ROOM)


@pytest.mark.parametrize("offload", ["host", "Disk", "ram", ""])
def test_a_tier_that_a_cpu_does_not_have_is_refused(offload: Any) -> None:
    with pytest.raises(ValueError, match=rf"offload={offload!r}, but values on cpu can go to 'disk' only"):
        memgraph.compile(net(), ROOM, offload=offload)


def test_a_module_without_parameters_is_on_the_cpu() -> None:
    assert device_of([]) == CPU


# --- too small


def test_a_budget_below_the_parameters_names_one_that_does() -> None:
    error = too_small()
    assert error.budget == 100
    assert error.smallest > sum(p.nbytes for p in net().parameters())
    assert "100 bytes are allowed; the smallest budget for which a plan was found is " in str(error)
    assert f"budget={error.smallest}" in str(error)


def test_the_error_names_an_op_and_the_lines_of_the_tensors_at_the_peak() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).exp().sin()

    text = str(smallest_of(Own(), batch()))
    assert re.search(r"Peak memory is at \w+ \(aten\.\w+\.\w+", text)
    assert re.search(r"test_byte_sizes\.py:\d+", text)
    assert "f32[100, 32]" in text


def test_the_error_survives_pickling() -> None:
    error = too_small()
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.budget, again.smallest) == (str(error), error.budget, error.smallest)


@pytest.mark.long
@pytest.mark.parametrize("offload", ["auto", None])
@pytest.mark.parametrize("rows", [3, 100])
def test_the_smallest_budget_trains_within_it_bit_equal_with_eager(rows: int, offload: str | None) -> None:
    module, x = net(), batch(rows)
    smallest = smallest_of(module, x, offload=offload).smallest
    compiled = memgraph.compile(module, smallest, offload=offload)
    found = []
    for model in (module, compiled, compiled):
        model.zero_grad()
        torch.manual_seed(1)
        model(x).sum().backward()
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))
    report = compiled.plan
    assert report.measured is not None
    assert report.measured <= report.peak <= smallest


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


@pytest.mark.long
def test_one_byte_less_than_the_smallest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fixed prices, since with others a search may find a plan below the smallest of the error."""
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(op_profiler, "_known", {})
    monkeypatch.setattr(op_profiler, "shortest_us", lambda *_, **__: 100.0)
    monkeypatch.setattr(
        "memgraph.profile.machine_profile.measure_files", lambda folder, room: (Link(((1000, 5.0),)),) * 2
    )
    monkeypatch.setattr(
        "memgraph.profile.machine_profile.measure_copy_overhead", lambda folder, links, room: CopyOverhead()
    )
    module, x = nn.Sequential(net(), Total()), batch()  # nothing but a number, or less would do if it is let go of
    smallest = smallest_of(module, x).smallest
    for p in module.parameters():  # with gradients to add to, the step needs most
        p.grad = torch.zeros_like(p)
    assert memgraph.plan(module, x, budget=smallest).peak <= smallest
    with pytest.raises(memgraph.BudgetError) as caught:
        memgraph.plan(module, x, budget=smallest - 1)
    assert caught.value.smallest == smallest


@pytest.mark.parametrize("offload", ["auto", None])
def test_the_smallest_budget_does_for_accumulation(offload: str | None) -> None:
    module, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), batch(4, 64)
    error = smallest_of(module, x, offload=offload)
    compiled = memgraph.compile(module, error.smallest, offload=offload)
    for _ in range(3):
        compiled(x).sum().backward()
        assert compiled.plan.measured is not None
        assert compiled.plan.measured <= compiled.plan.peak <= error.smallest
    numbers = [int(found) for found in re.findall(r"(?:found is|needs) (\d+)", str(error))]
    assert len(numbers) == 2
    assert max(numbers) == error.smallest > min(numbers)
    assert f"budget={error.smallest}" in str(error)


def test_a_step_without_gradients_needs_no_more_than_it_says() -> None:
    with torch.no_grad():
        error = smallest_of(net(), batch())
        assert memgraph.plan(net(), batch(), budget=error.smallest).peak == error.smallest
    assert "accumulation" not in str(error)


def test_a_budget_error_is_one_of_memgraphs() -> None:
    error = too_small()
    again = pickle.loads(pickle.dumps(error))
    for one in (error, again):
        assert isinstance(one, memgraph.MemgraphError)
        assert isinstance(one, passes.BudgetError)
    assert (again.budget, again.smallest) == (100, error.smallest)


@pytest.mark.long
def test_after_a_budget_error_a_smaller_batch_trains() -> None:
    module = net()
    compiled = memgraph.compile(module, memgraph.plan(module, batch(2), budget=ROOM).peak)
    with pytest.raises(memgraph.BudgetError):
        compiled(batch(1000))
    compiled(batch(2)).sum().backward()
    assert compiled.plan.peak <= compiled.plan.budget


@pytest.mark.long
def test_the_peak_falls_with_the_budget_and_the_time_rises() -> None:
    module, x = net(), batch()
    high, low = memgraph.plan(module, x, budget=ROOM).peak, smallest_of(module, x, offload=None).smallest
    budgets = [low + (high - low) * i // 6 for i in range(7)]
    plans = [memgraph.plan(module, x, budget=budget, offload=None) for budget in budgets]
    assert all(plan.peak <= budget for plan, budget in zip(plans, budgets, strict=True))
    assert len({plan.peak for plan in plans}) > 2
    for small, large in pairwise(plans):
        # The same sum may be added up in another order, the step's and what is added to it.
        assert small.forecast.us >= large.choice.lower_bound - 1e-6


@pytest.mark.long
def test_a_budget_that_works_without_a_tier_works_with_one() -> None:
    module, x = net(64, 6), batch(256, 64)
    assert smallest_of(module, x).smallest <= smallest_of(module, x, offload=None).smallest


class Heavy(nn.Module):
    """A model whose ops need workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(64, 64), nn.Conv1d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.linear(x).softmax(-1)).sort(-1)[0].cumsum(-1).square().sum()


def test_a_budget_error_does_not_spoil_the_forecasts_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    monkeypatch.setattr(op_profiler, "_known", {})
    module, x = Heavy(), torch.randn(16, 8, 64)
    smallest = smallest_of(module, x).smallest
    compiled = memgraph.compile(module, smallest)
    there = resident_bytes([*module.parameters(), x])
    compiled(x)
    _, allocated = measure_peak(lambda: compiled(x).backward())
    assert allocated is not None
    staging = int(compiled.plan.forecast.by_kind["staging"].max(initial=0))
    assert there + allocated.peak + staging <= smallest


def test_without_a_budget_that_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGRAPH_BUDGET", "64MB")
    assert budget_nbytes(None, CPU, resident=12345) == 64_000_000
    assert budget_nbytes("8MB", CPU) == 8_000_000
    monkeypatch.setenv("MEMGRAPH_BUDGET", "64Mb")
    with pytest.raises(ValueError, match="MEMGRAPH_BUDGET='64Mb' can't be read: \"Mb\" are bits"):
        budget_nbytes(None, CPU)
    monkeypatch.setenv("MEMGRAPH_BUDGET", "0.5")
    assert budget_nbytes(None, CPU) == budget_nbytes(0.5, CPU)
    monkeypatch.setenv("MEMGRAPH_BUDGET", "")
    assert budget_nbytes(None, CPU, resident=1) > 1
