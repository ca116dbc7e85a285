"""Generated arguments do not make a GPU stop the process."""

from __future__ import annotations

import pytest
import torch

from memgraph.profile.divided_arguments import fill_divisions

aten = torch.ops.aten


@pytest.mark.parametrize("rows", [1, 3])
def test_a_mask_is_true_in_as_many_places_as_the_source_has_numbers(rows: int) -> None:
    x, source = torch.zeros(rows, 6), torch.ones(2 * rows)
    mask = torch.ones(6, dtype=torch.bool) if rows == 3 else torch.ones(rows, 6, dtype=torch.bool)
    fill_divisions(aten.masked_scatter.default, [x, mask, source], {})
    assert int(mask.expand_as(x).sum()) == source.numel()
    aten.masked_scatter(x, mask, source)


def test_a_mask_that_is_false_stays_so() -> None:
    mask = torch.zeros(6, dtype=torch.bool)
    fill_divisions(aten.masked_scatter.default, [torch.zeros(6), mask, torch.ones(2)], {})
    assert not mask.any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_assertions_hold(dtype: torch.dtype) -> None:
    condition = torch.zeros((), dtype=dtype)
    fill_divisions(aten._assert_async.msg, [condition, "wrong"], {})
    aten._assert_async.msg(condition, "wrong")
