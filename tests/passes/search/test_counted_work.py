"""Bytes are counted when they are asked for, and come to the same whichever are asked for first."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from passes import Machine, Plan, Trace, apply, predict
from tests.support.strategies import machines, planned


@given(planned(), machines())
def test_the_total_is_what_all_kinds_hold(both: tuple[Trace, Plan], machine: Machine) -> None:
    forecast = predict(apply(*both), machine)
    assert np.array_equal(forecast.total, np.add.reduce(list(forecast.by_kind.values())))


@given(planned(), machines())
def test_what_is_alive_at_an_op_is_of_all_lives(both: tuple[Trace, Plan], machine: Machine) -> None:
    forecast = predict(apply(*both), machine)
    for index in range(len(forecast.trace.ops)):
        there = [life for life in forecast.lifetimes if life.first <= index <= life.last]
        assert forecast.live_at(index) == tuple(sorted(there, key=lambda life: -life.nbytes))
