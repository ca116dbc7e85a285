"""A saved plan is read unchanged, reused if it is valid, and otherwise refused with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.planning import search
from memgraph.report import saved_plan as saved
from memgraph.report.saved_plan import saved_plan, with_saved_prices
from passes import Link, Machine, parse, parse_plan
from tests.support.models import batch, net
from tests.support.zoo import CASES, fresh

ROOT = Path(__file__).parents[3]


@cache
def pressed() -> memgraph.Report:
    """A report that recomputes."""
    room = memgraph.plan(net(), batch(), budget="1GB").peak
    return memgraph.plan(net(), batch(), budget=room - 50_000, offload=None)


def given() -> memgraph.SavedPlan:
    return memgraph.SavedPlan.from_json(pressed().to_json())


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a search, although there is a plan")


# --- there and back


def test_what_is_written_is_read_back_to_the_last_digit() -> None:
    text = pressed().to_json()
    plan = memgraph.SavedPlan.from_json(text)
    assert plan.to_json() == text
    assert memgraph.SavedPlan.from_json(plan.to_json()) == plan
    assert plan.plan == pressed().plan != ()
    assert (
        replace(plan.machine, link=replace(plan.machine.link, capacity=pressed().machine.link.capacity))
        == pressed().machine
    )
    assert (plan.peak, plan.us) == (pressed().peak, pressed().forecast.us)
    assert (plan.bound_us, plan.any_us) == (pressed().bound_us, pressed().choice.any_us)


@pytest.mark.long
def test_the_plan_of_a_large_model_comes_back_and_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = fresh(next(case for case in CASES if case.name == "gpt2"))
    report = memgraph.plan(model, budget="30MB", time_limit=0, **inputs.kwargs)
    assert report.plan
    plan = memgraph.SavedPlan.from_json(report.to_json())
    assert plan.to_json() == report.to_json()
    monkeypatch.setattr(search, "make_plan", never)
    again = memgraph.plan(model, budget=report.budget, plan=plan, **inputs.kwargs)
    assert again.plan == report.plan
    assert again.peak == report.peak


def test_a_plan_without_decisions_comes_back() -> None:
    report = memgraph.plan(net(), batch(), budget="1GB")
    plan = memgraph.SavedPlan.from_json(report.to_json())
    assert plan.plan == ()
    assert memgraph.plan(net(), batch(), budget="1GB", plan=plan).plan == ()
    with pytest.raises(memgraph.PlanError, match="over the budget"):
        memgraph.plan(net(), batch(), budget=report.peak - 1, plan=plan)


@pytest.mark.parametrize("form", [memgraph.SavedPlan.to_json, lambda plan: plan])
def test_a_plan_is_given_as_text_or_as_it_is(form: Callable[[memgraph.SavedPlan], Any]) -> None:
    assert saved_plan(form(given())) == given()


@pytest.mark.parametrize("form", [str, Path])
def test_a_plan_is_given_as_a_file(form: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(pressed().to_json())
    assert saved_plan(form(tmp_path / "plan.json")) == given()


# --- used again


def test_a_plan_is_used_again_without_a_search_and_trains_like_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    text, budget = pressed().to_json(), pressed().budget
    monkeypatch.setattr(search, "make_plan", never)
    eager, module = net(), net()
    compiled = memgraph.compile(module, budget, plan=text)
    for model in (eager, compiled):
        torch.manual_seed(1)
        model(batch()).sum().backward()
    assert compiled.plan.plan == pressed().plan
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak <= budget
    for one, other in zip(eager.parameters(), module.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_plan_is_good_for_every_budget_that_its_peak_fits() -> None:
    for budget in (pressed().peak, pressed().peak + 1, pressed().budget + 1000):
        assert memgraph.plan(net(), batch(), budget=budget, plan=given()).plan == pressed().plan


def test_a_step_that_fits_as_it_is_runs_as_it_is() -> None:
    assert memgraph.plan(net(), batch(), budget="1GB", plan=given()).plan == ()


def test_what_was_proven_holds_for_the_same_prices_and_no_larger_budget() -> None:
    trace = parse("a = relu()  # f32[2] | makes a:8 | 3.0 us\nreturn\n")
    same = with_saved_prices(trace, Machine(1, link=Link(capacity=100)))
    assert with_saved_prices(trace, Machine(2, link=Link(capacity=200))) == same
    assert with_saved_prices(trace, Machine(1, link=Link(out=5.0))) != same
    assert with_saved_prices(parse(str(trace).replace("3.0", "4.0")), Machine(1)) != same
    proven = replace(given(), bound_us=1.0, any_us=1.0)
    small = memgraph.plan(net(), batch(), budget=pressed().budget, plan=proven, offload=None)
    large = memgraph.plan(net(), batch(), budget=pressed().budget + 1, plan=proven, offload=None)
    assert (small.bound_us, large.bound_us) == (1.0, 0.0)


def test_of_several_plans_each_call_takes_its_own() -> None:
    other = memgraph.plan(net(), batch(60), budget="1GB")
    compiled = memgraph.compile(net(), pressed().budget, plan=[other.to_json(), given()])
    compiled(batch(60)).sum().backward()
    assert compiled.plan.plan == ()
    compiled.zero_grad(set_to_none=True)
    compiled(batch()).sum().backward()
    assert compiled.plan.plan == pressed().plan


# --- refused, with the reason


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (net(layers=5), batch(), r"another model; op \d+ is the first that differs\nthere: input_0.*\nhere:  _4_0_w"),
        (net(width=16), batch(width=16), r"another model; op 0 is the first.*\nthere: .*f32\[32, 32\].*\nhere:  .*16"),
        (nn.Sequential(net(), nn.ReLU()), batch(), "another model; op 0 is the first"),
        (net(), batch(50), r"another shape; op \d+ is.*\nthere: input_0 = .*100, 32.*\nhere:  input_0 = .*50, 32"),
        (net().eval(), batch(), "another model; op"),
        (net().double(), batch().double(), r"another model; op 0 .*\nthere: .*f32.*\nhere:  .*f64"),
    ],
)
def test_a_plan_of_another_model_or_shape_is_refused(model: nn.Module, x: Tensor, reason: str) -> None:
    with pytest.raises(memgraph.PlanError, match=f"the saved plan is for {reason}"):
        memgraph.plan(model, x, budget=pressed().budget, plan=given())
    with pytest.raises(memgraph.PlanError, match=f"the saved plan is for {reason}"):
        memgraph.compile(model, pressed().budget, plan=given())(x)


def test_a_plan_without_the_optimizer_is_refused_with_one_and_the_other_way_round() -> None:
    model = net()
    with pytest.raises(memgraph.PlanError, match="is for another optimizer"):
        memgraph.plan(model, batch(), budget="1GB", plan=given(), optimizer=adam(model))
    text = memgraph.plan(model, batch(), budget="1GB", optimizer=adam(model)).to_json()
    with pytest.raises(memgraph.PlanError, match="is for another optimizer"):
        memgraph.plan(model, batch(), budget="1GB", plan=text)


def test_a_call_that_adds_to_gradients_is_another_call() -> None:
    compiled = memgraph.compile(net(), pressed().budget, plan=given())
    compiled(batch()).sum().backward()
    with pytest.raises(memgraph.PlanError, match="is for another call: gradients to add to"):
        compiled(batch())


def test_a_call_without_gradients_is_not_said_to_be_of_another_model() -> None:
    compiled = memgraph.compile(net(), pressed().budget, plan=given())
    with (
        torch.no_grad(),
        pytest.raises(memgraph.PlanError, match="is for a step with backward, and this call has none"),
    ):
        compiled(batch())
    with torch.no_grad():
        forward = memgraph.plan(net(), batch(), budget="1GB").to_json()
    with pytest.raises(memgraph.PlanError, match="is for a call without backward, and this call has one"):
        memgraph.plan(net(), batch(), budget="1GB", plan=forward)


def test_a_plan_of_another_torch_or_device_is_refused() -> None:
    with pytest.raises(memgraph.PlanError, match=r"is for torch 1\.2\.3, this is"):
        memgraph.plan(net(), batch(), budget="1GB", plan=replace(given(), torch="1.2.3"))
    elsewhere = replace(given(), machine=replace(given().machine, device="cuda:0"))
    with pytest.raises(memgraph.PlanError, match="is for cuda, and the model is on cpu"):
        memgraph.plan(net(), batch(), budget="1GB", plan=elsewhere)


def test_a_plan_over_the_budget_is_refused_with_the_budget_that_would_do() -> None:
    peak = pressed().peak
    with pytest.raises(
        memgraph.PlanError, match=f"needs {peak} bytes, over the budget of {peak - 1}: give budget={peak}"
    ):
        memgraph.plan(net(), batch(), budget=peak - 1, plan=given())


def test_a_plan_that_sends_away_is_refused_where_nothing_may_be_sent() -> None:
    value = next(op.name for op in given().step.ops if "gelu" in op.fn)
    sends = replace(given(), plan=parse_plan(f"offload {value}: out {value}, free {value}"))
    with pytest.raises(memgraph.PlanError, match="offloads to disk, which offload=None forbids"):
        memgraph.plan(net(), batch(), budget=pressed().budget, plan=sends, offload=None)


def test_a_plan_that_breaks_its_step_is_refused() -> None:
    for line in ("recompute nothing: before missing", "recompute output: before _0_0_weight"):
        broken = replace(given(), plan=parse_plan(line))
        with pytest.raises(memgraph.PlanError, match="can't be carried out on its step"):
            memgraph.plan(net(), batch(), budget=pressed().budget, plan=broken)


def damage(text: str, change: Callable[[dict[str, Any]], object]) -> str:
    facts = json.loads(text)
    change(facts)
    return json.dumps(facts)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:-40], "is not JSON"),
        (lambda text: "{", "is not JSON"),
        (lambda text: "[" * 100_000, "is not JSON"),
        (lambda text: "[1, 2]", "is no saved plan"),
        (lambda text: '{"a": 1}', "is no saved plan"),
        (lambda text: damage(text, lambda facts: facts.update(memgraph=99)), "has format 99, this memgraph reads 5"),
        (lambda text: damage(text, lambda facts: facts.update(peak=1)), "was damaged or changed"),
        (lambda text: damage(text, lambda facts: facts.pop("digest")), "was damaged or changed"),
        (lambda text: damage(text, lambda facts: facts["decisions"].pop()), "was damaged or changed"),
        (lambda text: text.replace("f32", "f16", 1), "was damaged or changed"),
    ],
)
def test_what_is_damaged_is_refused_at_once(change: Callable[[str], str], reason: str) -> None:
    with pytest.raises(memgraph.PlanError, match=reason):
        memgraph.compile(net(), "1GB", plan=change(pressed().to_json()))


WRONG = (None, "7", [1], {"a": 1}, True, 1.5, float("nan"), -3)


@pytest.mark.long
@pytest.mark.parametrize("wrong", WRONG, ids=map(str, WRONG))
def test_a_changed_plan_with_a_new_digest_is_refused_or_used(wrong: Any) -> None:
    def sealed(*path: str) -> str:
        facts = json.loads(pressed().to_json())
        del facts["digest"]
        place = facts
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = wrong
        return json.dumps({**facts, "digest": saved._seal(facts)})

    facts = json.loads(pressed().to_json())
    paths: list[tuple[str, ...]] = [(name,) for name in facts if name not in ("memgraph", "digest")]
    paths += [("machine", name) for name in (*facts["machine"], "strange")]
    paths += [("machine", "link", name) for name in (*facts["machine"]["link"], "strange")]
    for path in paths:
        try:
            plan = memgraph.SavedPlan.from_json(sealed(*path))
            memgraph.plan(net(), batch(), budget=pressed().budget, plan=plan)
        except memgraph.PlanError as error:
            assert "make a new plan" in str(error)
        else:
            before = reduce(lambda place, name: place[name], path, facts)
            assert type(wrong) in (type(before), int) and wrong == wrong


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    for path in (tmp_path / "missing", tmp_path, tmp_path / "noise", "no\0name", "x" * 10_000):
        with pytest.raises(memgraph.PlanError, match="no saved plan can be read from"):
            memgraph.compile(net(), "1GB", plan=path)


def test_a_plan_error_is_memgraphs_and_a_value_error() -> None:
    assert issubclass(memgraph.PlanError, memgraph.MemgraphError)
    assert issubclass(memgraph.PlanError, ValueError)


# --- the same plan, always

PLAN = """
import sys
from passes import Link, Machine, make_plan, parse
print(*make_plan(parse(sys.stdin.read()), Machine(int(sys.argv[1]), link=Link(1000.0, 1000.0))).plan, sep="\\n")
"""


def test_the_same_step_gets_the_same_plan_in_another_process() -> None:
    trace, budget = str(pressed().choice.captured.trace), str(pressed().budget)
    plans = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PLAN, budget]
        plans.append(subprocess.run(command, input=trace, env=environment, capture_output=True, text=True, check=True))
    assert plans[0].stdout == plans[1].stdout != "\n"


AGAIN = """
import sys, memgraph, torch
from torch import nn
net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)])
print(memgraph.plan(net, torch.randn(100, 32), budget=int(sys.argv[1]), plan=sys.stdin.read()).to_json())
"""


@pytest.mark.long
def test_a_plan_is_used_again_in_another_process() -> None:
    text, budget = pressed().to_json(), str(pressed().budget)
    command = [sys.executable, "-c", AGAIN, budget]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=True)
    again = memgraph.SavedPlan.from_json(run.stdout)
    assert (again.plan, again.bare_step, again.peak) == (given().plan, given().bare_step, given().peak)


# --- a limit on the time


@pytest.mark.parametrize("limit", [0, 0.0, 1e-9])
def test_without_time_there_is_still_a_plan_that_fits(limit: Any) -> None:
    report = memgraph.plan(net(), batch(), budget=pressed().budget, offload=None, time_limit=limit)
    assert report.plan
    assert report.peak <= report.budget
    assert report.forecast.us >= report.lower_bound


# --- the report


def test_the_report_says_what_is_proven_and_of_which_plans() -> None:
    report = pressed()
    choice = report.choice
    assert (report.overhead, report.gap) == (choice.overhead, choice.gap)
    assert (report.lower_bound, report.bound_us) == (choice.lower_bound, choice.bound_us)
    # Others run again for the sake of a third, and are early without it; which those are, prices say.
    one = next((said,) for said in choice.plan if replace(choice, plan=(said,)).is_single)
    single = memgraph.Report(report.machine, replace(choice, plan=one, bound_us=1.0))
    assert single.lower_bound == choice.captured.us + 1.0
    assert "proven: no plan in which each value is recomputed and reloaded at most once takes less than" in str(single)
    several = memgraph.Report(report.machine, replace(choice, plan=choice.plan * 2, any_us=2.0))
    assert "proven: no plan that recomputes in backward only, however often, takes less than" in str(several)
    nothing = memgraph.Report(report.machine, replace(choice, plan=one, bound_us=0.0, any_us=0.0))
    assert "proven: only that no plan is faster than the step as it is; this one is" in str(nothing)
    assert "proven" not in str(memgraph.plan(net(), batch(), budget="1GB"))
