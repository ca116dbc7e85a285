"""Rules of rows print and parse back; an op is linear in the reads of a group together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.slices.row_rule import RowFacts, RowRule, parse_rule, rows_of, type_shape

dims = st.tuples(st.integers(0, 5), st.integers(1, 2)).map(lambda pair: (pair[0], pair[0] + pair[1]))
rules = st.builds(RowRule, st.none() | dims, st.lists(st.none() | dims, max_size=4).map(tuple))


@given(rule=rules)
def test_a_rule_prints_and_parses_back(rule: RowRule) -> None:
    assert parse_rule(str(rule)) == rule


def test_the_rules_of_a_product() -> None:
    assert parse_rule("0:1<0:1,-") == RowRule((0, 1), ((0, 1), None))
    assert parse_rule("+<1:2,0:1") == RowRule(None, ((1, 2), (0, 1)))
    assert parse_rule("0:2<") == RowRule((0, 2), ())


@pytest.mark.parametrize("text", ["", "0:1", "-"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a rule of rows: .*write e\.g\.: 0:1<0:1,-"):
        parse_rule(text)


def test_the_shape_of_a_type() -> None:
    assert type_shape("f32[64, 8]") == (64, 8) and type_shape("i64[3]") == (3,) and type_shape("f32[]") == ()
    assert rows_of((4, 5, 6), (0, 2)) == 20 and rows_of((4, 5, 6), (2, 3)) == 6


def test_an_op_is_linear_in_all_reads_of_a_group_and_in_no_fewer() -> None:
    """x + y is not linear in x while y is fixed, and x * y is not linear in both."""
    total, product = RowFacts(linear=((0, 1),)), RowFacts(linear=((0,), (1,)))
    assert total.is_linear({0, 1}) and not total.is_linear({0}) and not total.is_linear({1})
    assert product.is_linear({0}) and product.is_linear({1}) and not product.is_linear({0, 1})
    assert not RowFacts().is_linear({0})
