"""A copy fails as a whole if its second chunk fails: nothing continues with half of the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn, optim

from memgraph import SpillError
from memgraph.optim.windowed_optimizer import WindowedOptimizer
from memgraph.storage.async_copy import Copy, finish_copies
from memgraph.storage.file_tier import FileTier
from memgraph.storage.io_threads import CHUNK, write
from memgraph.storage.mapped_storage import buffer_slice_of
from memgraph.storage.spill_file import unnamed_file
from memgraph.storage.transfer import offload_slices, offload_tensors, reload_slices
from tests.support.limits import files_of_at_most

NBYTES = 4 * CHUNK  # in two parts


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(NBYTES // 4, generator=torch.Generator().manual_seed(seed))


def test_the_whole_copy_has_failed(tmp_path: Path) -> None:
    copy = Copy(write, (unnamed_file(tmp_path, NBYTES), 0, NBYTES), numbers(0), "of a test")
    with files_of_at_most(NBYTES // 2):
        copy.begin(lambda part: None)
        finish_copies(copy)
    assert [part.error is None for part in copy.chunks] == [True, False]
    with pytest.raises(SpillError, match="File too large"):
        copy.end()


def test_a_partial_offload_is_not_reloaded(tmp_path: Path) -> None:
    lease = FileTier([NBYTES], tmp_path).lease()
    with files_of_at_most(NBYTES // 2):
        lease.offload(0, numbers(0))
        with pytest.raises(SpillError):
            lease.free(0)
    lease.reload(0, torch.zeros(NBYTES // 4))
    with pytest.raises(SpillError):
        lease.wait(0)


def test_what_waits_for_a_copy_is_not_read_if_its_second_part_has_failed(tmp_path: Path) -> None:
    (home,) = offload_tensors([numbers(0)], tmp_path)
    place, room = buffer_slice_of(home), torch.zeros(NBYTES // 4)
    assert place is not None
    with files_of_at_most(NBYTES // 2):
        leaving = offload_slices(place, numbers(1))
        coming = reload_slices(place, room, leaving.chunks)
        finish_copies(leaving, coming)
    assert not room.any()
    with pytest.raises(SpillError):
        coming.end()


@pytest.mark.parametrize("window", [NBYTES, 4 * NBYTES])
@pytest.mark.parametrize("half", [0, 1])
def test_large_windows_resume_after_an_error_with_all_that_was_not_written(
    tmp_path: Path, window: int, half: int
) -> None:
    plain, far = nn.Parameter(numbers(0)), nn.Parameter(numbers(0))
    far.data = offload_tensors([far.detach()], tmp_path)[0]
    steps = [optim.SGD([plain], lr=0.1), optim.SGD([far], lr=0.1)]
    WindowedOptimizer(steps[1], window, lambda parameter: False, tmp_path)
    for seed in (1, 2):
        plain.grad, far.grad = numbers(seed), numbers(seed)
        steps[0].step()
        with files_of_at_most(NBYTES // 2 if half else 0), pytest.raises(SpillError):
            steps[1].step()
        steps[1].step()
        assert torch.equal(far, plain)
