"""Tensors and fragments come back from a staging buffer to the bit, or rounded as the twin rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from memgraph.kernels import copy_runs, direct
from memgraph.kernels.direct import pack_pinned
from memgraph.kernels.formats import rounded
from memgraph.kernels.pack import gather, pack, scatter, unpack
from tests.support.numbers import DEVICE, WAY, hard, same


@pytest.fixture(autouse=True)
def _chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel was measured to be faster."""
    monkeypatch.setattr(copy_runs, "way_of", lambda *_: WAY)
    monkeypatch.setattr(direct, "way_of", lambda *_: WAY)


def some() -> list[Tensor]:
    dense = hard(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    return [
        hard(1300), dense.to(memory_format=torch.channels_last), dense.transpose(0, 3), hard(0), hard(1).view(()),
        hard(77, torch.bfloat16), hard(6, torch.float16).view(2, 3).t(),
    ]  # fmt: skip


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_packed_is_unpacked(wire: torch.dtype) -> None:
    tensors = some()
    staging = torch.empty(sum(x.numel() for x in tensors), dtype=wire, device=DEVICE)
    pack(tensors, staging)
    back = [torch.empty_like(x) for x in tensors]
    unpack(staging, back)
    for x, y in zip(tensors, back, strict=True):
        assert y.stride() == x.stride() and same(y, rounded(rounded(x, wire), x.dtype))


def test_pinned_memory_is_packed_as_any_by_few_programs() -> None:
    tensors = [hard(1300), hard(40), hard(9000)]
    slab = torch.empty(10340, dtype=torch.bfloat16, pin_memory=DEVICE.type == "cuda")
    pack_pinned(tensors, slab, seed=3, programs=2)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    staging = torch.empty(10340, dtype=torch.bfloat16, device=DEVICE)
    pack(tensors, staging, seed=3)
    assert same(slab, staging.cpu())


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=6))
def test_fragments_that_are_gathered_are_scattered_to_where_they_were(gaps: list[tuple[int, int]]) -> None:
    runs, at = [], 0
    for gap, count in gaps:
        runs.append((at + gap, count))
        at += gap + count
    x = torch.randn(at + 5, device=DEVICE)
    into = torch.empty(sum(count for _, count in runs), device=DEVICE)
    gather(x, runs, into)
    assert torch.equal(into, torch.cat([x[:0], *(x[first : first + count] for first, count in runs)]))
    back = torch.zeros_like(x)
    scatter(into, runs, back)
    kept = torch.zeros(len(x), dtype=torch.bool, device=DEVICE)
    for first, count in runs:
        kept[first : first + count] = True
    assert torch.equal(back, torch.where(kept, x, 0.0))


def test_a_buffer_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a flat tensor of 7 elements is wanted, not one of shape"):
        pack([hard(7)], hard(8))
    with pytest.raises(ValueError, match="gaps or overlaps"):
        pack([hard(8)[::2]], hard(4))
