"""By the second meter, all that torch's allocator gives to a step with weights in blocks is within its forecast."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.allocator_meter import compiler
from tests.support.block_models import WORDS, head_in_blocks
from tests.support.counted_blocks import MODELS, STEPS
from tests.support.counted_steps import rows_of_child

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="the second meter is a library of C that stands before glibc"
)


@pytest.mark.long
@head_in_blocks
def test_every_step_in_blocks_is_within_its_budget(tmp_path: Path) -> None:
    rows = rows_of_child("tests.support.counted_blocks", MODELS, tmp_path)
    assert len(rows) == STEPS * len(MODELS)
    assert all(row.budget < WORDS * 1024 for row in rows)  # less than one of the two large weights
    assert not [row for row in rows if row.step and not row.counted <= row.forecast <= row.budget]
    assert not [row for row in rows if row.measured is not None and row.measured > row.forecast]
