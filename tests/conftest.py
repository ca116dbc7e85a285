"""How hypothesis tries: without a clock, and in CI always the same examples; and costs that are nobody's but the tests'."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "memgraph",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],  # the machine may be busy with something else
)
settings.load_profile("memgraph")


@pytest.fixture(scope="session", autouse=True)
def _costs_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured is shared by the tests, and not with the user's own processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMGRAPH_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield
