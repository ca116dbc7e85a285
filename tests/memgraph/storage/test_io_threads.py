"""A write that ends early says why."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from memgraph.storage.io_threads import read, write
from memgraph.storage.spill_file import PAGE, unnamed_file
from tests.support.limits import files_of_at_most

PAGES = torch.arange(8 * PAGE, dtype=torch.int32).to(torch.uint8)


@pytest.mark.parametrize("allowed", [0, 100, PAGE, PAGE + 100, 7 * PAGE + 512])
def test_a_file_that_may_not_grow_is_too_large(allowed: int, tmp_path: Path) -> None:
    file = unnamed_file(tmp_path, PAGES.nbytes)
    try:
        with files_of_at_most(allowed), pytest.raises(OSError, match="File too large") as caught:
            write(file, 0, PAGES.data_ptr(), PAGES.nbytes)
        assert caught.value.errno == errno.EFBIG
        write(file, 0, PAGES.data_ptr(), PAGES.nbytes)
    finally:
        os.close(file)


def test_a_write_that_ends_within_a_page_found_no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: PAGE + 100)
    with pytest.raises(OSError, match="No space left on device, 28572 bytes were not taken") as caught:
        write(0, 0, PAGES.data_ptr(), PAGES.nbytes)
    assert caught.value.errno == errno.ENOSPC


def test_a_write_in_several_goes_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, plain = unnamed_file(tmp_path, PAGES.nbytes), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, views, offset: plain(file, [views[0][: 3 * PAGE]], offset))
    try:
        write(file, 0, PAGES.data_ptr(), PAGES.nbytes)
        back = torch.zeros_like(PAGES)
        read(file, 0, back.data_ptr(), back.nbytes)
        assert torch.equal(back, PAGES)
    finally:
        os.close(file)
