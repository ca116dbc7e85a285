"""Set up all tests: hypothesis without a deadline, and with fixed examples in CI; a cache of prices for the tests;
garbage collection without imported objects; Ctrl-C as in a terminal; and a mark for those that long_tests.txt names."""

from __future__ import annotations

import gc
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from memgraph.planning import plan_cache
from memgraph.system import disturbance, garbage

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
    """Mark the long tests, and put them behind the others in the order of their list, as --within may leave out some."""
    names = (Path(__file__).parent / "long_tests.txt").read_text().split()
    place = {name: i for i, name in enumerate(names, 2)}

    def order(item: pytest.Item) -> int:
        return place.get(item.nodeid.partition("[")[0], int(item.get_closest_marker("long") is not None))

    items.sort(key=order)
    for item in items:
        if order(item) > 1:
            item.add_marker("long")


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
def _nothing_imported_is_garbage() -> Iterator[None]:
    """Freeze the objects of torch and transformers, hundreds of thousands that every collection would visit."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "count_frozen", lambda: 1)  # to count a million takes 40 ms, for each plan
        yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Restore SIGINT, which tests send, and which a shell without job control ignores for background processes."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)
