"""The states of the generators of `random` and numpy at one moment.

before = PythonRandom();  random.random();  before.has_changed()   ->   True
before.restore()
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class PythonRandom:
    """Both states; numpy's only if numpy was imported."""

    def __init__(self) -> None:
        self._numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        self._python_state = random.getstate()
        self._numpy_state = self._numpy.get_state() if self._numpy else None

    def has_changed(self) -> bool:
        """Return True if numbers were drawn since."""
        if random.getstate() != self._python_state:
            return True
        if self._numpy is None:
            return getattr(sys.modules.get("numpy"), "random", None) is not None
        return not _is_same(self._numpy.get_state(), self._numpy_state)

    def restore(self) -> None:
        """Set both generators back."""
        random.setstate(self._python_state)
        if self._numpy is not None:
            self._numpy.set_state(self._numpy_state)


@contextmanager
def restoring_python_random() -> Iterator[PythonRandom]:
    """Restore both generators at the end of the block."""
    before = PythonRandom()
    try:
        yield before
    finally:
        before.restore()


def _is_same(now: Any, before: Any) -> bool:
    return all((a == b).all() if hasattr(a, "all") else a == b for a, b in zip(now, before, strict=True))
