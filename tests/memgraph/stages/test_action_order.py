"""The order of actions blocks no rank, although each send waits for its receiver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memgraph.stages.action_order import SCHEDULES, StageOrder

Event = tuple[str, int, int]  # the start or end of forward or backward: kind, stage, micro-batch


def _waits(order: StageOrder) -> Iterator[tuple[Event, list[Event]]]:
    """Yield the events of a stage in order, with those of others that each waits for, if all stages exchange values.

    A value is received once its sender has computed it, and sent once its receiver has begun to ask for it.
    """
    stage, earlier, later = order.stage, range(order.stage), range(order.stage + 1, order.stages)
    for action, chunk in order.actions():
        if action == "forward":
            yield ("ask forward", stage, chunk), []
            yield ("forward", stage, chunk), [("forward", other, chunk) for other in earlier]
            continue
        sent = ((other, chunk - order.unread_gradients(other)) for other in earlier)
        yield ("sent", stage, chunk), [("ask backward", other, i) for other, i in sent if i >= 0]
        yield ("ask backward", stage, chunk), []
        yield ("backward", stage, chunk), [("backward", other, chunk) for other in later]
        yield ("values", stage, chunk), [("ask forward", other, chunk) for other in later]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8, 20])
def test_no_stage_waits_forever(schedule: str, stages: int, chunks: int) -> None:
    orders = [StageOrder(schedule, stage, stages, chunks) for stage in range(stages)]
    left = [list(_waits(order)) for order in orders]
    done: set[Event] = set()
    moved = True
    while moved:
        moved = False
        for events in left:
            while events and done.issuperset(events[0][1]):
                done.add(events.pop(0)[0])
                moved = True
    assert left == [[]] * stages


def test_orders() -> None:
    actions = [f"{action[0].upper()}{chunk}" for action, chunk in StageOrder("1f1b", 0, 2, 3).actions()]
    assert actions == ["F0", "F1", "B0", "F2", "B1", "B2"]
    assert [StageOrder("1f1b", stage, 3, 8).open_forwards for stage in range(3)] == [3, 2, 1]
    assert StageOrder("gpipe", 1, 3, 8).open_forwards == 8
