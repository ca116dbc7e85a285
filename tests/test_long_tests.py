"""The tests that `make test` leaves to `make long` exist, and the law and the promise are not among them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LONG = (TESTS / "long_tests.txt").read_text().split()


@pytest.mark.parametrize("name", LONG)
def test_a_long_test_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    assert re.search(rf"^def {function}\(", (TESTS.parent / path).read_text(), re.MULTILINE)
    assert not re.search(r"test_(law|promise)\.py", path)
