"""The ops of a lookup in blocks of rows have the bits of `embedding` and of its backward, and refuse what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memgraph.slices.slice_ops import INDICES_WITHIN, LOOK_UP
from passes.slices.row_blocks import rows_of_blocks

ROWS, COLUMNS = 1000, 33


def looked_up(weight: Tensor, indices: Tensor, size: int) -> Tensor:
    out = torch.full((*indices.shape, weight.shape[1]), torch.nan, dtype=weight.dtype)
    for first, last in rows_of_blocks(len(weight), size):
        LOOK_UP(out, weight[first:last], indices, first, len(weight))
    return out


@pytest.mark.parametrize("size", [1, 7, 192, 999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lookup_has_the_bits_of_embedding(size: int, dtype: torch.dtype) -> None:
    weight = torch.randn(ROWS, COLUMNS).to(dtype)
    weight[5], weight[6] = torch.nan, torch.inf
    for indices in (torch.randint(ROWS, (4, 9)), torch.tensor([[5, 6, 0, ROWS - 1]]), torch.zeros(3, 0).long()):
        expected = torch.nn.functional.embedding(indices, weight)
        assert torch.equal(looked_up(weight, indices, size).nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("padding", [-1, 0, 500])
@pytest.mark.parametrize("size", [1, 192, 999])
def test_gradients_of_blocks_are_those_of_embedding(size: int, padding: int) -> None:
    dy, indices = torch.randn(40, COLUMNS), torch.randint(ROWS, (40,))
    indices[:8], indices[8:11] = 500, 0  # several of one row are added in their order
    whole = torch.ops.aten.embedding_dense_backward(dy, indices, ROWS, padding, False)
    parts = [
        torch.ops.aten.embedding_dense_backward(
            dy, INDICES_WITHIN(indices, first, last - first, padding), last - first, -1, False
        )
        for first, last in rows_of_blocks(ROWS, size)
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_an_index_that_embedding_refuses_is_refused(wrong: int) -> None:
    with pytest.raises(IndexError, match="index out of range in self"):
        looked_up(torch.randn(ROWS, 4), torch.tensor([3, wrong]), 192)


def test_indices_are_not_changed() -> None:
    indices = torch.tensor([0, 5, 9])
    assert INDICES_WITHIN(indices, 4, 3, -1).tolist() == [-1, 1, -1] and indices.tolist() == [0, 5, 9]
