"""A capture serves the calls whose facts it assumes, with any number or length where these are open."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from memgraph.guards.assumptions import (
    ARGUMENTS,
    ATTRIBUTES,
    Assumptions,
    Facts,
    Layout,
    Place,
    TensorFact,
    differing_sizes,
    number_at,
)

CPU = torch.device("cpu")
NUMBERS = st.one_of(
    st.integers(0, 3).map(lambda n: (int, n)), st.sampled_from(["0.1", "0.2"]).map(lambda n: (float, n))
)
GROUPS = st.lists(NUMBERS, min_size=3, max_size=3).map(tuple)
FACTS = st.lists(GROUPS, min_size=5, max_size=5).map(tuple)
PLACES = st.frozensets(st.tuples(st.integers(0, 4), st.integers(0, 2)))


def tensor(*shape: int) -> TensorFact:
    return TensorFact(0, 0, Tensor, True, Layout(shape, torch.empty(shape).stride(), torch.float32, CPU, False))


def changed(fact: TensorFact, **fields: Any) -> TensorFact:
    return fact._replace(layout=fact.layout._replace(**fields))


def facts(*arguments: object, alpha: str = "0.1", steps: int = 3) -> Facts:
    return (*arguments, "spec"), (), (True,), (("alpha", "steps"), (float, alpha), (int, steps))


@given(FACTS, FACTS, PLACES)
def test_a_call_is_served_if_it_differs_at_open_places_alone_and_in_a_number_of_the_same_type(
    one: Facts, other: Facts, places: frozenset[Place]
) -> None:
    def agrees(place: Place) -> bool:
        found: Any = [each[place[0]][place[1]] for each in (one, other)]
        (kind, number), (other_kind, other_number) = found
        return kind is other_kind and (number == other_number or place in places)

    assumptions = Assumptions.of(one, places)
    everywhere = [(group, index) for group in range(5) for index in range(3)]
    assert assumptions.holds(one)
    assert assumptions.holds(other) == all(map(agrees, everywhere))
    assert list(assumptions.differing(other)) == [place for place in everywhere if not agrees(place)]


@given(FACTS, FACTS)
def test_variables_that_later_captures_read_do_not_count(one: Facts, more: Facts) -> None:
    assert Assumptions.of(one).holds((*one, *more))
    assert not Assumptions.of((*one, *more)).holds(one)


@given(st.integers(2, 9), st.integers(2, 9), st.integers(2, 9), st.integers(2, 9))
def test_a_length_that_two_arguments_share_is_one_symbol(a: int, b: int, c: int, d: int) -> None:
    one, other = facts(tensor(4, a), tensor(a, 3)), facts(tensor(4, b), tensor(b, 3))
    symbols = differing_sizes(one, other, [(ARGUMENTS, 0), (ARGUMENTS, 1)])
    if a == b:
        assert not symbols
        return
    assumptions = Assumptions.of(one, symbols=symbols)
    assert symbols == {(0, 1): 0, (1, 0): 0} and assumptions.lengths(other) == [b]
    assert assumptions.holds(other)
    apart = facts(tensor(4, c), tensor(d, 3))
    assert assumptions.holds(apart) and assumptions.lengths(apart) == ([c] if c == d else None)


def test_strides_follow_from_a_length_only_where_the_tensor_is_dense() -> None:
    padded = changed(tensor(4, 8), stride=(16, 1))
    assumptions = Assumptions.of(facts(tensor(4, 8)), symbols={(0, 1): 0})
    assert assumptions.holds(facts(tensor(4, 9))) and not assumptions.holds(facts(padded))
    assert not assumptions.holds(facts(changed(tensor(4, 9), requires_grad=True)))
    assert assumptions.lengths(facts(tensor(4, 1))) is None  # ops take other ways for one


@pytest.mark.parametrize("other", [facts(tensor(4)), facts(tensor(4), (int, 1), (int, 2)), facts((int, 1), tensor(4))])
def test_no_size_is_open_where_more_than_sizes_differs(other: Facts) -> None:
    one = facts(tensor(8), (int, 1))
    places = list(Assumptions.of(one).differing(other))
    assert places and differing_sizes(one, other, places) == {}


def test_a_number_is_there_unless_any_may_be() -> None:
    place = (ATTRIBUTES, 1)
    assert number_at(facts(), place) == 0.1
    assert number_at(Assumptions.of(facts(), [place]).facts, place) is None
