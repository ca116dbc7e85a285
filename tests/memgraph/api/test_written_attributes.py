"""Attributes have what forward writes to them after each run, and other kinds of calls find it, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.compare import ROOM, assert_equal


class Writing(nn.Module):
    """Its forward writes to an attribute, and scales by what it then finds there."""

    def __init__(self, scale: Callable[[Any, int], float]) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(4, 4), scale
        self.seen: Any = {}
        self.rows: Any = None
        self.listed: list[int] = []
        self.held = SimpleNamespace(kinds={}, largest=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale(self, x.shape[0])


def number(part: Any, rows: int) -> float:
    if rows not in part.seen:
        part.seen[rows] = len(part.seen)
    return 1.0 + part.seen[rows]


def first(part: Any, rows: int) -> float:
    part.rows = part.rows or rows
    return float(part.rows)


def new_attribute(part: Any, rows: int) -> float:
    if not hasattr(part, "made_for"):
        part.made_for = (rows, {"rows": rows})
    return float(part.made_for[1]["rows"])


def listed(part: Any, rows: int) -> float:
    if rows not in part.listed:
        part.listed.append(rows)
    return 1.0 + part.listed.index(rows)


def in_an_object(part: Any, rows: int) -> float:
    part.held.kinds.setdefault(rows, 2.0 * len(part.held.kinds))
    return float(part.held.kinds[rows])


def replaced(part: Any, rows: int) -> float:
    part.seen = {**part.seen, rows: part.seen.get(rows, len(part.seen))}
    return 1.0 + part.seen[rows]


def latest(part: Any, rows: int) -> float:
    part.rows = (rows,)
    return 1.0


def latest_shape(part: Any, rows: int) -> float:
    part.rows = torch.ones(rows, 2).shape
    return 1.0


def logged(part: Any, rows: int) -> float:
    part.seen["latest"] = rows
    return 1.0


KINDS = [number, first, new_attribute, listed, in_an_object, replaced, latest, latest_shape, logged]


@pytest.mark.long
@pytest.mark.parametrize("scale", KINDS)
@pytest.mark.parametrize("order", [(9, 7, 9, 5, 7, 9, 5), (2, 3, 2)])
def test_kinds_of_calls_see_what_others_wrote(scale: Callable[[Any, int], float], order: Sequence[int]) -> None:
    torch.manual_seed(0)
    plain = Writing(scale)
    ours = copy.deepcopy(plain)
    compiled = memgraph.compile(ours, ROOM)
    for rows in order:
        assert_same_step(plain, ours, compiled, rows)
        assert state(ours) == state(plain)


def state(module: Any) -> list[Any]:
    return [module.seen, module.rows, module.listed, module.held, getattr(module, "made_for", None)]


def largest(part: Any, rows: int) -> float:
    part.held.largest = max(part.held.largest or 0, rows)
    return float(part.held.largest)


def alternating(part: Any, rows: int) -> float:
    part.seen.setdefault(rows, None)
    return float(max(part.seen))


@pytest.mark.parametrize("scale", [largest, alternating])
def test_a_call_that_a_later_kind_changes_is_captured_again(scale: Callable[[Any, int], float]) -> None:
    torch.manual_seed(0)
    plain = Writing(scale)
    ours = copy.deepcopy(plain)
    compiled = memgraph.compile(ours, ROOM)
    for rows in (2, 3, 2, 3, 2):
        assert_same_step(plain, ours, compiled, rows)
        assert state(ours) == state(plain)


def test_evaluation_sees_what_training_wrote() -> None:
    torch.manual_seed(0)
    plain = Writing(lambda part, rows: part.seen.setdefault("train", 3.0) if part.training else len(part.seen))
    ours = copy.deepcopy(plain)
    compiled = memgraph.compile(ours, ROOM)
    assert_same_step(plain, ours, compiled, 2)
    plain.eval()
    compiled.eval()
    with torch.no_grad():
        assert torch.equal(plain(torch.ones(2, 4)), compiled(torch.ones(2, 4)))


class Changed(nn.Module):
    """Training writes what evaluation reads; the caller may change it in between."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.table: dict[str, float] = {}
        self.listed: list[float] = []
        self.held = SimpleNamespace(scale=None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.table["scale"], self.held.scale = 2.0, 3.0
            self.listed += [] if self.listed else [4.0]
        return self.body(x) * self.table.get("scale", 1.0) * (self.held.scale or 1.0) * (self.listed or [1.0])[0]


def change_dict(part: Any) -> None:
    part.table["scale"] = 7.0


def change_object(part: Any) -> None:
    part.held.scale = 7.0


def change_list(part: Any) -> None:
    part.listed[:] = [7.0]


@pytest.mark.parametrize("change", [change_dict, change_object, change_list])
def test_the_caller_may_change_what_was_written(change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    plain = Changed()
    ours = copy.deepcopy(plain)
    compiled = memgraph.compile(ours, ROOM)
    assert_same_step(plain, ours, compiled, 2)
    change(plain)
    change(ours)
    plain.eval()
    compiled.eval()
    with torch.no_grad():
        assert torch.equal(plain(torch.ones(2, 4)), compiled(torch.ones(2, 4)))


def test_a_plan_of_a_call_that_never_runs_writes_nothing() -> None:
    torch.manual_seed(0)
    plain = Writing(number)
    ours = copy.deepcopy(plain)
    memgraph.plan(ours, torch.ones(9, 4), budget=ROOM)
    compiled = memgraph.compile(ours, ROOM)
    for rows in (2, 3):
        assert_same_step(plain, ours, compiled, rows)


class Logging(nn.Module):
    """Its forward writes a float that it is given."""

    def __init__(self, container: Any) -> None:
        super().__init__()
        self.body, self.container = nn.Linear(4, 4), container

    def forward(self, x: Tensor, scale: float) -> Tensor:
        if isinstance(self.container, dict):
            self.container["scale"] = scale
        else:
            self.container.scale = scale
        return self.body(x) * scale


@pytest.mark.parametrize("container", [{}, SimpleNamespace(scale=None)])
def test_floats_that_are_written_are_inputs_of_a_step(container: Any) -> None:
    plain = Logging(container)
    ours: Any = copy.deepcopy(plain)
    compiled = memgraph.compile(ours, ROOM)
    for scale in (0.1, 0.2, 0.3, 0.4):
        assert torch.equal(compiled(torch.ones(2, 4), scale), plain(torch.ones(2, 4), scale))
        assert ours.container == plain.container
    assert len(compiled.plans) == 2  # with constants, and with the floats as inputs


def assert_same_step(plain: nn.Module, ours: nn.Module, compiled: nn.Module, rows: int) -> None:
    x = torch.linspace(-1, 1, 4 * rows).view(rows, 4)
    results = []
    for module, run in ((plain, plain), (ours, compiled)):
        module.zero_grad()
        y = run(x)
        y.square().sum().backward()
        results.append([y, *(parameter.grad for parameter in module.parameters())])
    assert all(map(torch.equal, *results)), rows


def doubled(part: nn.Module, args: Any, result: Any) -> Any:
    return result * 2


class Observed(nn.Module):
    """Its first forward registers a hook that doubles what its body returns, and notes that it has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        if not getattr(self, "is_observed", None):
            self.is_observed = "yes"
            self.body.register_forward_hook(doubled)
        return self.body(x)


def test_hooks_that_forward_registers_are_there_in_other_calls() -> None:
    plain = Observed()
    ours = copy.deepcopy(plain)
    compiled = memgraph.compile(ours, ROOM)
    for rows in (2, 3, 2, 4):
        assert torch.equal(plain(torch.ones(rows, 4)), compiled(torch.ones(rows, 4)))
    assert ours.body._forward_hooks.keys() and ours.is_observed == "yes"


def test_hidden_states_of_transformers_are_there_in_other_calls() -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    plain = BertForMaskedLM(
        BertConfig(
            num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=20,
            output_hidden_states=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    compiled = memgraph.compile(ours := copy.deepcopy(plain), ROOM)
    for i, length in enumerate((8, 8, 6, 8)):
        ids = torch.randint(20, (2, length), generator=torch.Generator().manual_seed(i))
        for each in (plain, compiled):
            each.zero_grad()
            outputs = each(input_ids=ids, labels=ids)
            (outputs.loss + sum(states.square().mean() for states in outputs.hidden_states)).backward()
            assert len(outputs.hidden_states) == 2
        assert_equal([p.grad for p in plain.parameters()], [p.grad for p in ours.parameters()])
