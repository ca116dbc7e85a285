"""Code that ran names variables and functions, and a capture that names more costs no other capture."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn

import memgraph
from memgraph.guards.outer_snapshot import OuterSnapshot
from memgraph.guards.what_ran import WhatRan

IN_TRAINING, IN_EVALUATION, UNREAD = 2, 3, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * (IN_TRAINING if self.training else evaluated())


def evaluated() -> int:
    return IN_EVALUATION


def unread() -> int:
    return UNREAD


def after(run: Callable[[], object], module: nn.Module) -> WhatRan:
    before = OuterSnapshot(WhatRan(module.named_modules()))
    with before.watching():
        run()
    return before.ran


def test_only_what_ran_counts() -> None:
    module = Model()
    ran = after(lambda: module(torch.ones(2, 4)), module)
    names = {name for scope in ran.scopes if scope.owner is globals() for name in scope.names or ()}
    assert "IN_TRAINING" in names and not names & {"IN_EVALUATION", "UNREAD"}
    assert Model.forward in ran.functions and evaluated not in ran.functions


def test_the_functions_of_several_closures_are_told_apart() -> None:
    def making(by: int) -> Callable[[], int]:
        return lambda: by

    module = Model()
    first, second = making(1), making(2)
    module.held = [first, second]  # type: ignore[assignment]
    ran = after(lambda: second(), module)
    assert second in ran.functions and first not in ran.functions


def test_a_capture_that_reads_more_lets_the_others_stand(planned: list[str]) -> None:
    module, x = Model(), torch.ones(2, 4)
    compiled = memgraph.compile(module, "1GB")
    for _ in range(2):
        for training in (True, False):
            compiled.train(training)
            assert torch.equal(compiled(x), module(x))
    assert len(planned) == 2


def test_what_the_other_kind_reads_is_seen_in_its_calls(planned: list[str]) -> None:
    module, x = Model(), torch.ones(2, 4)
    compiled = memgraph.compile(module, "1GB")
    for training in (True, False):
        compiled.train(training)
        compiled(x)
    with mock.patch.dict(globals(), {"IN_EVALUATION": 5}):
        assert torch.equal(compiled(x), module(x))
    assert torch.equal(compiled(x), module(x))


def test_a_variable_that_nothing_reads_costs_no_capture(planned: list[str]) -> None:
    module, x = Model(), torch.ones(2, 4)
    compiled = memgraph.compile(module, "1GB")
    for i in range(3):
        globals()["UNREAD"] = i + unread()
        compiled(x)
    assert len(planned) == 1
