"""Fixtures of the tests of guards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from memgraph.planning.planner import Planner


@pytest.fixture
def planned() -> Iterator[list[str]]:
    """Grows by one word for each step that is planned."""
    said: list[str] = []
    real = Planner.step

    def step(*args: Any, **kwargs: Any) -> Any:
        said.append("planned")
        return real(*args, **kwargs)

    with mock.patch.object(Planner, "step", step):
        yield said
