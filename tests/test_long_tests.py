"""The law and the promise are not among the tests that `make test` leaves to `make long`."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent


def test_the_law_and_the_promise_always_run() -> None:
    always = [path for name in ("test_law.py", "test_promise.py") for path in TESTS.rglob(name)]
    assert len(always) >= 4
    assert [path for path in always if "\n@pytest.mark.long" in path.read_text()] == []
