"""Windows hold every element once, begin at pages, and keep to their size."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from memgraph.optim.window_plan import LINE, WindowRow, plan_windows, range_boxes
from memgraph.storage.spill_file import PAGE

itemsizes = st.lists(st.sampled_from([1, 2, 4, 8]), max_size=3).map(tuple)
rows = st.builds(WindowRow, st.integers(0, 100_000), st.just((4, 4)), itemsizes, itemsizes, st.booleans())


@given(st.lists(rows, max_size=6), st.integers(0, 1 << 20))
def test_windows_hold_every_element_once_and_in_order(rows: list[WindowRow], more: int) -> None:
    nbytes = max((row.nbytes(min(row.count, row.granularity)) for row in rows), default=0) + more
    windows = plan_windows(rows, nbytes)
    chunks = [chunk for window in windows for chunk in window]
    for window in windows:
        assert sum(rows[chunk.row].nbytes(chunk.count) for chunk in window) <= nbytes
        assert sum(rows[chunk.row].buffer_nbytes(chunk.count) for chunk in window) <= nbytes + 4 * LINE * len(window)
    for i, row in enumerate(rows):
        ends = [(chunk.begin, chunk.end) for chunk in chunks if chunk.row == i]
        assert [0, *(end for _, end in ends)] == [*(begin for begin, _ in ends), row.count]
        assert all(begin * size % PAGE == 0 for begin, _ in ends for size in row.buffered + row.resident + row.created)
    assert [chunk.row for chunk in chunks] == sorted(chunk.row for chunk in chunks)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_are_a_range_of_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    begin = data.draw(st.integers(0, tensor.numel()))
    end = data.draw(st.integers(begin, tensor.numel()))
    found = [view.reshape(-1) for view in range_boxes(tensor, begin, end)]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *found]), tensor.reshape(-1)[begin:end])
    assert all(
        view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        for view in range_boxes(tensor, begin, end)
    )
