"""The captures of a module: the latest used is tried first, each says what it assumes, and the log says what differs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.graph.guard_ops import GuardFailed, ValueGuard
from memgraph.planning.variants import CallFacts
from memgraph.report.report import Report
from memgraph.tensors.loss_outputs import select_all
from tests.support.compare import ROOM

SCALE = 1.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.alpha, self.kind = nn.Linear(4, 4), nn.Dropout(0.0), 0.5, "sum"

    def forward(self, x: Tensor, beta: float = 0.1, *, mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.drop(self.linear(x)) * self.alpha * beta * SCALE
        return found if self.kind == "sum" else found.tanh()


def guard(number: int, expected: bool, where: str = "here", predicate: str = "") -> ValueGuard:
    return ValueGuard(number, (expected,), "equal", where, predicate)


def failed(guards: tuple[ValueGuard, ...], number: int, actual: bool) -> CallFacts:
    return CallFacts((), [], False, select_all, lambda: failed(guards, number, actual)).after(
        GuardFailed(number, (actual,), guards)
    )


TRUE, FALSE, OTHER = guard(0, True), guard(0, False), guard(0, True, "elsewhere")


@pytest.mark.parametrize(
    ("guards", "agrees"),
    [
        ((TRUE, guard(1, True)), False),  # it is the one that has failed
        ((FALSE, guard(1, True)), True),
        ((TRUE, guard(1, False)), False),  # its first guard fails as well
        ((), False),  # it asks for less
        ((OTHER, guard(1, True)), True),  # it asks for something else
        ((guard(0, True, predicate="v0 < 4"),), True),
    ],
)
def test_a_variant_is_tried_unless_what_was_found_contradicts_it(guards: tuple[ValueGuard, ...], agrees: bool) -> None:
    assert failed((TRUE, guard(1, True)), 0, False).agrees(guards) == agrees


def other_global() -> None:
    globals()["SCALE"] += 1.0


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value)


@pytest.mark.parametrize(
    ("change", "arguments", "says"),
    [
        (put("kind", "mean"), {}, "kind is 'mean', and was 'sum'"),
        (put("alpha", 2), {}, "alpha is 2, and was 0.5"),
        (lambda model: other_global(), {}, "SCALE is 2.0, and was 1.0"),
        (lambda model: model.eval(), {}, "drop.training is False, and was True"),
        (lambda model: None, {"mask": torch.ones(2)}, "the structure of the arguments has changed"),
        (lambda model: model.linear.requires_grad_(False), {}, "linear.weight is float32 4 x 4 on cpu, and was "),
        (lambda model: model(torch.ones(2, 4)).sum().backward(), {}, "gradients exist"),
    ],
)
def test_the_log_says_in_what_a_call_differs_from_the_most_similar_one(
    change: Callable[[Any], None], arguments: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    compiled = memgraph.compile(Scaled(), ROOM)
    compiled(torch.ones(2, 4))
    change(compiled)
    with caplog.at_level(logging.INFO, "memgraph"):
        compiled(torch.ones(2, 4), **arguments)
    said = [text for record in caplog.records if "is captured, priced and planned" in (text := record.getMessage())]
    assert len(said) == 1 and says in said[0].partition("(capture 2): ")[2]


def test_what_changes_while_a_call_is_planned_counts_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = memgraph.compile(Scaled(), ROOM)
    planner, x = compiled.__dict__["_kept"].planner, torch.ones(2, 4)
    real = planner.step

    def changing(*given: Any) -> Any:
        step = real(*given)
        compiled.alpha = 2.0  # as another thread may
        return step

    monkeypatch.setattr(planner, "step", changing)
    before = compiled(x)
    assert torch.equal(compiled(x), 4.0 * before) and torch.equal(compiled(x), compiled._module(x))


def rests_on(report: Report) -> dict[str, tuple[str, str]]:
    return {each.where: (each.kind, each.text) for each in report.assumptions}


def test_a_plan_says_on_what_its_step_rests() -> None:
    compiled = memgraph.compile(Scaled(), ROOM)
    compiled(torch.ones(2, 4), 0.2).sum().backward()
    found = rests_on(compiled.plan)
    assert found["x"] == ("argument", "float32 2 x 4 on cpu") and found["beta"] == ("argument", "0.2")
    assert found["linear.bias"] == ("tensor", "float32 4 on cpu, requires grad")
    assert found["grad mode"] == ("mode", "True")
    assert found["alpha"] == ("attribute", "0.5") and found["drop.p"] == ("attribute", "0.0")
    assert found[f"{__name__}.SCALE"] == ("variable", "1.0")
    compiled.zero_grad()
    compiled(torch.ones(2, 4), 0.3).sum().backward()
    assert rests_on(compiled.plan)["beta"] == ("argument", "any float")
    assert "beta" not in str(compiled.plan) and Report.from_json(compiled.plan.to_json()).assumptions == ()


def test_values_that_return_find_their_capture() -> None:
    class Hot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
            found: Tensor = self.linear(x) + nn.functional.one_hot(kinds).sum()
            return found

    compiled = memgraph.compile(Hot(), ROOM)
    for most in (3, 5, 4, 3, 5, 4):
        x, kinds = torch.ones(2, 4), torch.tensor([0, most])
        assert torch.equal(compiled(x, kinds), compiled._module(x, kinds))
    assert len(compiled.plans) == 3
