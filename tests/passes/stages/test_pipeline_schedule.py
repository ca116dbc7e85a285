"""Orders of actions: no rank waits forever, each micro-batch runs once, and bubbles are those of the literature."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.stages.action import BACKWARD, FORWARD, WEIGHTS, Action
from passes.stages.pipeline_schedule import NO_GRADIENTS, SCHEDULES, PipelineSchedule
from passes.stages.timeline import StageTimes, simulate

Event = tuple[object, ...]


@st.composite
def schedules(draw: st.DrawFn) -> PipelineSchedule:
    name = draw(st.sampled_from([*SCHEDULES, NO_GRADIENTS]))
    several = draw(st.integers(1, 4)) if name in ("interleaved", NO_GRADIENTS) else 1
    ranks, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    return PipelineSchedule(name, ranks, chunks, several, runs_ahead=draw(st.booleans()))


def _waits(schedule: PipelineSchedule, rank: int) -> Iterator[tuple[Event, list[Event]]]:
    """Yield the events of a rank in order, with those of others that each waits for, if all stages exchange values.

    A value is received once its sender has computed it, and sent once its receiver has asked for it.
    """
    sent: dict[tuple[str, int, int], list[int]] = {}
    for action in schedule.actions[rank]:
        kind, stage, chunk = action
        others = range(stage) if kind == FORWARD else range(stage + 1, schedule.stages)
        readers = range(stage + 1, schedule.stages) if kind == FORWARD else range(stage)
        if kind == BACKWARD or schedule.name == NO_GRADIENTS:
            for reader in readers:
                works = sent.get((kind, stage, reader), [])
                late = set(works) - set(schedule.still_unread(reader, works, action))
                yield ("settled", action, reader), [("ask", Action(kind, reader, i)) for i in late]
                sent[kind, stage, reader] = [i for i in works if i not in late]
        yield ("ask", action), []
        yield action, [] if kind == WEIGHTS else [Action(kind, other, chunk) for other in others]
        if kind != WEIGHTS:
            for reader in readers:
                sent.setdefault((kind, stage, reader), []).append(chunk)
                is_settled = kind == BACKWARD or schedule.name == NO_GRADIENTS
                assert len(sent[kind, stage, reader]) <= schedule.unread(kind, stage, reader) or not is_settled
        if kind == BACKWARD:
            later = range(stage + 1, schedule.stages)
            yield ("values", action), [("ask", Action(FORWARD, other, chunk)) for other in later]


@given(schedules())
def test_no_rank_waits_forever(schedule: PipelineSchedule) -> None:
    left = [list(_waits(schedule, rank)) for rank in range(schedule.ranks)]
    done: set[Event] = set()
    moved = True
    while moved:
        moved = False
        for events in left:
            while events and done.issuperset(events[0][1]):
                done.add(events.pop(0)[0])
                moved = True
    assert left == [[]] * schedule.ranks


def test_a_rank_that_does_not_run_ahead_keeps_one_message() -> None:
    for runs_ahead, kept in ((True, 2), (False, 1)):
        schedule = PipelineSchedule(NO_GRADIENTS, 3, 8, runs_ahead=runs_ahead)
        assert [schedule.unread(FORWARD, stage, stage + 1) for stage in (0, 1)] == [kept, kept]


@given(schedules())
def test_each_micro_batch_runs_once_in_each_stage(schedule: PipelineSchedule) -> None:
    kinds = {NO_GRADIENTS: (FORWARD,), "zero_bubble": (FORWARD, BACKWARD, WEIGHTS)}
    expected = itertools.product(
        kinds.get(schedule.name, (FORWARD, BACKWARD)), range(schedule.stages), range(schedule.chunks)
    )
    assert Counter(itertools.chain(*schedule.actions)) == Counter(itertools.starmap(Action, expected))
    for rank, actions in enumerate(schedule.actions):
        assert {action.stage % schedule.ranks for action in actions} == {rank}


def test_orders() -> None:
    def text(schedule: PipelineSchedule, rank: int) -> str:
        return " ".join(
            f"{kind[0].upper()}{chunk}" + "'" * (stage // 2) for kind, stage, chunk in schedule.actions[rank]
        )

    assert text(PipelineSchedule("1f1b", 2, 3), 0) == "F0 F1 B0 F2 B1 B2"
    assert text(PipelineSchedule("gpipe", 2, 3), 1) == "F0 F1 F2 B0 B1 B2"
    assert text(PipelineSchedule("zero_bubble", 2, 3), 0) == "F0 F1 B0 W0 F2 B1 W1 B2 W2"
    assert text(PipelineSchedule("zero_bubble", 2, 3), 1) == "F0 B0 F1 B1 W0 F2 B2 W1 W2"
    assert text(PipelineSchedule("interleaved", 2, 2, 2), 0) == "F0 F1 F0' F1' B0' B1' B0 B1"
    assert text(PipelineSchedule(NO_GRADIENTS, 2, 3, 2), 1) == "F0 F1 F0' F1' F2 F2'"


@pytest.mark.parametrize(
    "name, chunks, bubble, forwards",
    [
        ("gpipe", 8, 0.273, [8, 8, 8, 8]),
        ("1f1b", 8, 0.273, [4, 3, 2, 1]),
        ("1f1b", 16, 0.158, [4, 3, 2, 1]),
        ("interleaved", 8, 0.158, [8, 8, 7, 5, 4, 4, 3, 1]),
        ("zero_bubble", 8, 0.111, [4, 4, 4, 4]),
    ],
)
def test_bubbles_are_those_of_the_literature(name: str, chunks: int, bubble: float, forwards: list[int]) -> None:
    schedule = PipelineSchedule(name, 4, chunks, 2 if name == "interleaved" else 1)
    weights = 1.0 if name == "zero_bubble" else 0.0
    timeline = schedule.timeline([StageTimes(1.0, 2.0 - weights, weights)] * schedule.stages)
    assert round(timeline.bubble, 3) == bubble
    assert [schedule.open_forwards(stage) for stage in range(schedule.stages)] == forwards


def test_a_stage_recomputes_while_it_waits() -> None:
    schedule = PipelineSchedule("1f1b", 2, 1)
    late = schedule.timeline([StageTimes(1.0, 5.0), StageTimes(1.0, 2.0)])
    early = schedule.timeline([StageTimes(1.0, 5.0, recompute=2.5), StageTimes(1.0, 2.0)])
    assert (late.us, early.us) == (9.0, 6.5)
    assert (late.hidden, early.hidden) == ((0.0, 0.0), (2.5, 0.0))


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    first = [Action(BACKWARD, 0, 0), Action(FORWARD, 0, 0)]
    second = [Action(FORWARD, 1, 0), Action(BACKWARD, 1, 0)]
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([first, second], [StageTimes(1.0, 1.0)] * 2)


def test_what_is_sent_comes_later() -> None:
    schedule = PipelineSchedule("1f1b", 2, 1)
    times = [StageTimes(1.0, 2.0, sent_forward=0.5), StageTimes(1.0, 2.0, sent_backward=0.25)]
    assert schedule.timeline(times).us == 6.75
