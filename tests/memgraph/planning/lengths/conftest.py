"""The traces of a test, counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from memgraph.capture import trace_call
from memgraph.capture.joint.trace_joint import trace_joint
from tests.support.lengths import Traces


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    counted = Traces()

    def count(call: Any, mode: Any, *rest: Any) -> Any:
        counted.general += mode.sizes is not None
        counted.plain += mode.sizes is None
        return trace_joint(call, mode, *rest)

    monkeypatch.setattr(trace_call, "trace_joint", count)
    yield counted
