"""Attributes that Python itself gives to objects and files, which a `__getattr__` of theirs may answer with any error.

attributes_of(thing)   ->   its `__dict__`, or None
file_of("numpy")       ->   the path of that module, or None
"""

from __future__ import annotations

import sys
from typing import Any


def attributes_of(thing: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of an object; None if it has none."""
    try:
        inside = vars(thing)
    except Exception:
        return None
    return inside if isinstance(inside, dict) else None


def file_of(name: str) -> str | None:
    """Return the path of a module that was imported; None if it has none."""
    try:
        found = getattr(sys.modules.get(name), "__file__", None)
    except Exception:
        return None
    return found if isinstance(found, str) else None
