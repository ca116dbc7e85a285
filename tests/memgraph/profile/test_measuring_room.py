"""The bytes that measuring the machine may take, in a budget that a model keeps and in one that it does not."""

from __future__ import annotations

from memgraph.profile.measuring_room import rates_room


def test_the_budget_is_kept_where_it_can_be() -> None:
    assert rates_room(None, 30) is None
    assert rates_room(0, 30) == 0 and rates_room(7, 30) == 7


def test_beside_a_model_beyond_the_budget_there_is_a_sixteenth_of_it() -> None:
    assert rates_room(-98, 30) == 8
