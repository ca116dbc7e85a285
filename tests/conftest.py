"""How hypothesis tries: without a clock, and in CI always the same examples."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "memgraph",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],  # the machine may be busy with something else
)
settings.load_profile("memgraph")
