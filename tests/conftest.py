"""How hypothesis tries: without a clock, and in CI always the same examples; costs that are nobody's but the tests';
collections of what the tests made, and not of all that was imported; and Ctrl-C as in a terminal."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from memgraph.planning import plan_cache

pytest_plugins = ["tests.support.fixtures"]

settings.register_profile(
    "memgraph",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],  # the machine may be busy with something else
)
settings.register_profile("thorough", settings.get_profile("memgraph"), derandomize=False, max_examples=200)
settings.load_profile("memgraph")


@pytest.fixture(scope="session", autouse=True)
def _costs_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured is shared by the tests, and not with the user's own processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMGRAPH_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield


@pytest.fixture(autouse=True)
def _plans_of_one_test(_costs_of_the_tests: None) -> None:
    """A plan or a graph that one test has found is none for another, which may have put its own in the place of a search
    or a trace."""
    plan_cache._texts.clear()
    plan_cache._near.clear()
    for name in ("plans.sqlite*", "captures.sqlite*"):
        for path in Path(os.environ["MEMGRAPH_CACHE"]).glob(name):
            path.unlink()


@pytest.fixture(scope="session", autouse=True)
def _nothing_imported_is_garbage() -> Iterator[None]:
    """Torch and transformers are hundreds of thousands of objects, through which every collection would go."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> Iterator[None]:
    """A shell without job control starts what runs in the background with SIGINT ignored; the tests send it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)
