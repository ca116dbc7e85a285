"""Arguments of a wrong type or value are refused with the same message everywhere; numpy's numbers and booleans are
accepted."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memgraph
from memgraph.options.argument_rules import COMPILE_RULES, SHARDED_RULES, check_argument
from memgraph.options.compile_options import FIRST_CALL_S, LEAST_S
from memgraph.system.byte_sizes import shortened
from tests.support.models import batch, net

WAYS: list[Callable[..., Any]] = [memgraph.compile, memgraph.plan, memgraph.sweep]
NO_FLAG: list[Any] = ["yes", "", 1, 0, None, 1.0, [True], torch.tensor(True)]
NO_BUDGET: list[Any] = [True, np.True_, [1], b"8GB", (1,), 8j, torch.tensor(8), object(), int]
WRONG_TYPE: dict[str, list[Any]] = {
    "model": [None, 7, "model", nn.Linear, torch.nn.functional.relu, torch.ones(2)],
    "budget": NO_BUDGET,
    "budgets": ["8GB", 8, 0.5, b"8GB", {1: 2}, object(), np.ones(2)],
    "optimizer": ["adam", torch.optim.Adam, 0.1, [torch.ones(2)]],
    "loss": ["mse", 3, torch.ones(2), nn.MSELoss],
    "offload": [True, 3, b"disk", ["disk"], Path("disk")],
    "spill_dir": [7, b"/tmp", ["/tmp"], 1.5, True],
    "plan": [7, b"{}", {"memgraph": 1}, [None], object(), memgraph.SavedPlan],
    "time_limit": [True, "5", [5], torch.tensor(5.0), 5j],
    "wire_dtype": ["bf16", 16, True, torch.Tensor, np.float32],
    "microbatches": [True, 2.0, "2", None, np.True_, torch.tensor(2)],
    "reduction": [1, True, ["mean"], b"mean", torch.mean],
    "accumulate": [1, 0, "auto", np.ones(2)],
    "forwards": [True, 2.0, "2", None, torch.tensor(2)],
    "fuse_update": NO_FLAG,
    "host_update": NO_FLAG,
    "lower": [True, 1, ["inductor"], np.ones(2), torch.compile],
    "strict": NO_FLAG,
    "host": NO_BUDGET,
    "disk": NO_BUDGET,
    "cuda_graphs": [1, 0, None, np.ones(2), ["auto"]],
    "opaque": [1, 0, None, "encoder", np.ones(2)],
    "slices": [3, True, ["lm_head"], b"auto", np.ones(2), [None]],
}
NO_SUCH: dict[str, list[Any]] = {
    "budgets": [[], ()],
    "spill_dir": [""],
    "time_limit": [-1, -0.001, math.nan, -math.inf, -(10**400)],
    "microbatches": [0, -1, np.int64(-3), 10**39],
    "forwards": [0, -1, (1 << 20) + 1, 2**63, 10**39],
    "reduction": ["max", "", "Mean"],
    "lower": ["triton", "", "Inductor"],
    "cuda_graphs": ["yes", "", "True"],
    "opaque": [[1], [None]],
    "slices": ["yes", "", "Auto", {"head": 1}, {"head": True}, {"head": 2.0}, {3: 2}, {"head": None}, {"head": 10**39}],
}
WRONG_OF_SHARDS: dict[str, list[Any]] = {
    "params": [None, 3, torch.ones(2), nn.Linear(1, 1), nn.Sequential(), nn.ModuleList(), "weight"],
    "optim": [None, "Adam", torch.optim.Adam([torch.ones(1, requires_grad=True)]), lambda params: None],
    "gradients": [None, True, 1, ["same"]],
    "wire_dtype": ["bf16", 16, np.float32],
    "bucket_bytes": [None, "25MB", 1e6, True, np.True_],
    "gather": [None, True, np.ones(2)],
}
NO_SUCH_OF_SHARDS: dict[str, list[Any]] = {
    "optim": [int, nn.Linear],
    "gradients": ["sum", ""],
    "wire_dtype": [torch.float32, torch.int8],
    "bucket_bytes": [0, -1, np.int64(0)],
    "gather": ["later", ""],
}


def said(name: str, value: Any) -> set[tuple[type[Exception], str]]:
    """Return the messages of all functions that have this argument."""
    found = set()
    for way in WAYS:
        if name in inspect.signature(way).parameters:
            given = {"model": net(), name: value}
            with pytest.raises(Exception) as caught:
                way(given.pop("model"), *(() if way is memgraph.compile else (batch(),)), **given)
            found.add((caught.type, str(caught.value)))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG_TYPE.items() for value in values])
def test_what_is_of_a_wrong_type_is_refused_in_the_same_words_everywhere(name: str, value: Any) -> None:
    ((kind, text),) = said(name, value)
    assert kind is TypeError
    assert re.match(rf"{name} is (None|an? \w+(, .+)?|the class \w+); ", text)
    assert text.endswith(COMPILE_RULES[name].advice)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NO_SUCH.items() for value in values])
def test_what_makes_no_sense_is_refused_in_the_same_words_everywhere(name: str, value: Any) -> None:
    assert said(name, value) == {(ValueError, f"{name}={shortened(value)}; {COMPILE_RULES[name].advice}")}


def test_the_table_is_of_all_arguments() -> None:
    named = {name for way in WAYS for name in inspect.signature(way).parameters} - {"args", "kwargs"}
    assert named == COMPILE_RULES.keys() == WRONG_TYPE.keys()
    others = inspect.signature(memgraph.OSS).parameters.keys() - {"group", "defaults"}
    assert others == SHARDED_RULES.keys() == WRONG_OF_SHARDS.keys()


@pytest.mark.parametrize(
    ("wrong", "values"), [(TypeError, WRONG_OF_SHARDS), (ValueError, NO_SUCH_OF_SHARDS)], ids=["type", "value"]
)
def test_so_is_what_the_sharded_optimizer_does_not_take(wrong: type[Exception], values: dict[str, list[Any]]) -> None:
    for name, several in values.items():
        for value in several:
            with pytest.raises(wrong, match=f"^{name}(=| is ).*; {re.escape(SHARDED_RULES[name].advice)}$"):
                check_argument(name, value, SHARDED_RULES)


def test_a_list_of_parameters_is_one_though_it_is_a_module() -> None:
    several = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
    assert check_argument("params", several, SHARDED_RULES) is several


def test_numbers_and_truth_values_may_be_of_numpy() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    plain: dict[str, Any] = {
        "budget": 10**9,
        "time_limit": 0.5,
        "microbatches": 2,
        "fuse_update": True,
        "cuda_graphs": False,
    }
    plain["slices"] = {"0": 4}
    other = {
        "budget": np.int64(10**9), "time_limit": np.float32(0.5), "microbatches": np.uint8(2),
        "fuse_update": np.True_, "cuda_graphs": np.False_, "strict": np.False_,
        "slices": {"0": np.int64(4)},
    }  # fmt: skip
    planners = [memgraph.compile(model, optimizer=optimizer, **given)._planner for given in (plain, other)]
    assert repr(planners[0].options) == repr(planners[1].options)
    assert type(planners[1].target.budget) is int
    assert [type(planner.module._count) for planner in planners] == [int, int]


@pytest.mark.parametrize("limit", [0, 2, 0.5, np.float32(0.5), np.int64(3), Fraction(1, 2), math.inf])
def test_a_limit_is_so_many_seconds(limit: Any) -> None:
    assert memgraph.compile(net(), time_limit=limit)._planner.options.time_limit == limit
    assert memgraph.compile(net(), time_limit=limit)._planner.options.planning_s(30.0) == limit


def test_without_a_limit_planning_has_what_capture_left_of_a_first_call() -> None:
    options = memgraph.compile(net())._planner.options
    assert options.time_limit is None
    assert options.planning_s(0.0) == FIRST_CALL_S > options.planning_s(20.0) == FIRST_CALL_S - 20.0 > LEAST_S
    assert options.planning_s(1000.0) == options.planning_s() == LEAST_S


def test_several_plans_may_be_given() -> None:
    plan = memgraph.SavedPlan.from_json(memgraph.plan(net(), batch(), budget="1GB", time_limit=0).to_json())
    several: list[Any] = [[plan, plan.to_json()], (plan, plan)]
    for given in several:
        assert memgraph.compile(net(), plan=given)._planner.options.plans == (plan, plan)


def test_a_long_argument_is_shown_by_its_beginning() -> None:
    for name in ("budget", "optimizer", "lower"):
        ((_, text),) = said(name, "{" + 10_000 * "x")
        assert len(text) < 400 and "'{xxx" in text and text.endswith(COMPILE_RULES[name].advice)
