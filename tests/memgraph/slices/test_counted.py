"""By the second meter, all that torch's allocator gives to a step in slices is within its forecast and its budget."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.allocator_meter import compiler
from tests.support.counted_slices import STEPS
from tests.support.counted_steps import rows_of_child

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="the second meter is a library of C that stands before glibc"
)
MODELS = ("cross entropy:0.5", "z-loss:0.5", "shifted labels:0.5", "two heads:0.5", "tied weights:0.4")


@pytest.mark.long
def test_every_step_in_slices_is_within_its_budget(tmp_path: Path) -> None:
    rows = rows_of_child("tests.support.counted_slices", MODELS, tmp_path)
    assert len(rows) == STEPS * len(MODELS)
    assert not [row for row in rows if not row.counted <= row.forecast <= row.budget]
    assert not [row for row in rows if row.measured is None or row.measured < row.counted]
