"""Steps with opaque parts are within their budget by the second meter, while the parts take more and more memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_counted import children
from tests.support import counted_experts
from tests.support.allocator_meter import compiler
from tests.support.counted_steps import STEPS, Counted

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or compiler() is None, reason="the second meter is a library of C that stands before glibc"
)


@pytest.mark.long
@pytest.mark.parametrize("options", [("0.8",), ("0.7", "--optimizer")])
def test_every_step_with_parts_is_within_its_budget(tmp_path: Path, options: tuple[str, ...]) -> None:
    lines = children(tmp_path, *options, of="tests.support.counted_parts")
    rows = [Counted(**json.loads(line)) for line in lines]
    assert len(rows) == STEPS
    assert len({row.forecast for row in rows}) > 1
    for row in rows:
        assert row.counted <= row.forecast <= row.budget
        assert row.measured is not None
        assert row.measured >= row.counted


@pytest.mark.long
def test_every_step_is_within_its_forecast_however_rows_are_routed(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in children(tmp_path, of="tests.support.counted_experts")]
    assert len(rows) == counted_experts.STEPS > 60
    assert len({row["counted"] for row in rows}) > 20
    assert not [row for row in rows if not row["counted"] <= row["forecast"] <= row["budget"]]
