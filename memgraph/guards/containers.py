"""Lists, dicts, sets and deques: compare one with a copy, and give it the items of that copy again.

copy = counts.copy();  counts["n"] += 1;  restore_container(counts, copy)
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

RESTORED = (dict, OrderedDict, list, set, deque)


def restore_container(container: Any, before: Any) -> None:
    """Give a list, dict, set or deque the items of a copy again, if it has others."""
    if not has_same_items(container, before):
        container.clear()
        container.extend(before) if isinstance(container, list | deque) else container.update(before)


def has_same_items(now: Any, before: Any) -> bool:
    """Return True if two containers hold the same objects."""
    pairs = zip(items_of(now), items_of(before), strict=False)
    return len(now) == len(before) and all((a[0] is b[0] or a[0] == b[0]) and a[1] is b[1] for a, b in pairs)


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """Return keys and values, or positions and items."""
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))
