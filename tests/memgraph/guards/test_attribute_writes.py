"""The changes between two snapshots, as writes that can be done again."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memgraph.guards.attribute_snapshot import AttributeSnapshot
from memgraph.guards.attribute_writes import attribute_writes, is_alike


def module() -> Any:
    made: Any = nn.Sequential(nn.Linear(2, 2))
    made[0].table, made[0].kept = {"a": 1, "b": 2}, {"same": 1}
    made.order, made.latest, made.names = [1], deque([1, 2], 2), {"a"}
    made.held = SimpleNamespace(size=1)
    made.gone = "here"
    return made


def write(made: Any) -> None:
    made[0].table["c"] = {"deep": [3]}
    del made[0].table["a"]
    made.order.append(2)
    made.latest.append(3)
    made.names = {"b"}
    made.held.size = 5
    made.new = (1, "x")
    del made.gone
    made.tensor = torch.ones(2)


def state(made: Any) -> list[Any]:
    attributes = {
        name: value for name, value in vars(made).items() if name in ("order", "latest", "names", "new", "gone")
    }
    return [repr(attributes), repr(made[0].table), repr(made[0].kept), made.held.size]


def test_writes_that_are_applied_give_the_same_attributes() -> None:
    made = module()
    begin, before = state(made), AttributeSnapshot(made)
    with before.restored_attributes():
        write(made)
        writes, after = attribute_writes(before, AttributeSnapshot(made)), state(made)
    assert state(made) == begin
    writes.apply(lambda leaf: leaf)
    assert state(made) == after
    assert torch.equal(made.tensor, torch.ones(2))


def test_equal_writes_are_described_alike() -> None:
    described = []
    for _ in range(2):
        made = module()
        before = AttributeSnapshot(made)
        write(made)
        described.append(attribute_writes(before, AttributeSnapshot(made)).described)
    assert described[0] == described[1]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1, 1, True), (1, 1.0, False), (1, True, False), ([1, "a"], [1, "a"], True), ([1], [1, 2], False),
        (torch.ones(2), torch.zeros(2), True), (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False), ((torch.ones(2),), [torch.ones(2)], False),
        (0.0, -0.0, False), (float("nan"), float("nan"), True), (None, None, True),
    ],
)  # fmt: skip
def test_values_are_alike_by_structure_layouts_and_constants(one: Any, other: Any, expected: bool) -> None:
    assert is_alike(one, other) is expected


def test_writes_keep_no_module_alive() -> None:
    made = module()
    before = AttributeSnapshot(made)
    made.new = 1
    (only,) = attribute_writes(before, AttributeSnapshot(made)).items
    assert only.owner.end is vars(made) and only.where == "new"
    del made, before
    assert not only.owner.end


def test_a_forward_that_writes_nothing_has_no_writes() -> None:
    made = module()
    assert attribute_writes(AttributeSnapshot(made), AttributeSnapshot(made)).items == ()
