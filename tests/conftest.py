"""Set up all tests: hypothesis without a deadline, and with fixed examples in CI; a cache of prices for the tests;
garbage collection without imported objects; Ctrl-C as in a terminal; and the long ones behind the others."""

from __future__ import annotations

import gc
import math
import os
import signal
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from memgraph.planning import plan_cache
from memgraph.system import disturbance, garbage

SECONDS_FROZEN = 1.0  # objects that tests leave are frozen as often
_frozen_until = [0.0]

with torch.device("meta"):
    torch.empty(0)  # torch lists its factories at the first such call, and transformers replaces some for a while

pytest_plugins = ["tests.support.fixtures", "tests.support.time_limits"]

settings.register_profile(
    "memgraph",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],  # the machine may be busy with something else
)
settings.register_profile("thorough", settings.get_profile("memgraph"), derandomize=False, max_examples=200)
settings.load_profile("memgraph")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long tests behind the others, in an order of no meaning, as --within may leave out some."""
    items.sort(key=lambda item: _function_crc(item) if item.get_closest_marker("long") is not None else 0)


def _function_crc(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.partition("[")[0].encode())


@pytest.fixture(scope="session", autouse=True)
def _costs_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share measurements among the tests, but not with the user's own processes; none is doubted on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disturbance, "LIMIT", math.inf)
        patch.setenv("MEMGRAPH_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield


@pytest.fixture(autouse=True)
def _plans_of_one_test(_costs_of_the_tests: None) -> None:
    """Drop cached plans and graphs between tests, because a test may replace the search or the trace."""
    plan_cache._texts.clear()
    plan_cache._near.clear()
    for name in ("plans.sqlite*", "captures.sqlite*"):
        for path in Path(os.environ["MEMGRAPH_CACHE"]).glob(name):
            path.unlink()


@pytest.fixture(scope="session", autouse=True)
def _frozen_objects() -> Iterator[None]:
    """Let planning freeze nothing: to count a million frozen objects takes 40 ms, for each plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "count_frozen", lambda: 1)
        yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _nothing_imported_is_garbage(_frozen_objects: None) -> None:
    """Freeze the objects of torch, of transformers and of earlier tests: every plan collects garbage, and visits the rest.

    They are hundreds of thousands: to visit them took most of the time of all tests.
    """
    if time.monotonic() > _frozen_until[0]:
        gc.collect()
        gc.freeze()
        _frozen_until[0] = time.monotonic() + SECONDS_FROZEN


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Restore SIGINT, which tests send, and which a shell without job control ignores for background processes."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)
