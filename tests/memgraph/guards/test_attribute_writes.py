"""The changes between two snapshots are put in place for a block, and taken back."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from memgraph.guards.attribute_snapshot import AttributeSnapshot
from memgraph.guards.attribute_writes import attribute_writes, written


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


def test_writes_are_put_in_place_for_a_block() -> None:
    made = module()
    begin, before = state(made), AttributeSnapshot(made)
    with before.restored_attributes():
        write(made)
        writes, after = attribute_writes(before, AttributeSnapshot(made)).items, state(made)
    assert state(made) == begin
    with written(writes):
        assert state(made) == after
        assert not hasattr(made, "tensor")
    assert state(made) == begin


def test_equal_values_have_equal_tokens() -> None:
    tokens = []
    for _ in range(2):
        made = module()
        before = AttributeSnapshot(made)
        write(made)
        tokens.append([write.token for write in attribute_writes(before, AttributeSnapshot(made)).items])
    assert tokens[0] == tokens[1]


def test_writes_keep_no_module_alive() -> None:
    made = module()
    before = AttributeSnapshot(made)
    made.new = 1
    (only,) = attribute_writes(before, AttributeSnapshot(made)).items
    assert only.owner() is vars(made) and only.where == "new"
    del made, before
    assert only.owner() is None


def test_a_forward_that_writes_nothing_has_no_writes() -> None:
    made = module()
    assert attribute_writes(AttributeSnapshot(made), AttributeSnapshot(made)).items == ()
