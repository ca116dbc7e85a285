"""The attributes that eager would have written in the calls so far.

forward(9 rows): self.seen[9] = 0    ->   forward(7 rows) is captured with self.seen == {9: 0}

A step that is kept was captured before later calls wrote something. It is captured once more when it is called again,
and refused if the graph is another: which one is right depends on the order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ..capture.sizes.same_capture import is_same_capture
from ..errors import CaptureError
from ..graph.captured import Captured
from ..guards.attribute_writes import AttributeWrite, AttributeWrites, written
from ..system.locks import PLANNING_LOCK

STATES = 5  # with which a capture is the same until later ones are taken to change nothing

Written = dict[Hashable, tuple[AttributeWrite, Any]]  # with what the module itself has there
State = frozenset[tuple[Hashable, Hashable]]


@dataclass(frozen=True, eq=False)
class KnownCapture:
    """All that was written before a capture was made, and the writes of its calls, by what is written before them."""

    before: Sequence[AttributeWrite]
    writes: dict[State, Sequence[AttributeWrite]]

    def after(self, state: State) -> Sequence[AttributeWrite]:
        """Return what the call writes; in a state that is not known, what it has written in all others."""
        if state in self.writes:
            return self.writes[state]
        first, *rest = ({(item.place, item.token): item for item in items} for items in self.writes.values())
        return [item for key, item in first.items() if all(key in other for other in rest)]


class PendingWrites:
    """The writes of one module's calls, and with which of them each capture is known to be right."""

    def __init__(self) -> None:
        self._written: Written = {}
        self._state: State = frozenset()
        self._known = WeakKeyDictionary[AttributeWrites, KnownCapture]()

    def in_place(self) -> AbstractContextManager[None]:
        """Put all that was written in place for a block."""
        self._forget_replaced()
        return written(self._items())

    def check(self, writes: AttributeWrites, capture: Callable[[], Captured]) -> None:
        """Make sure that a capture, known by its `writes`, is right with what is written now; a new one is.

        Raises:
            CaptureError: what was written since it was made changes it.
        """
        self._forget_replaced()
        known = self._known.get(writes.general or writes)
        if known is None:
            known = KnownCapture(self._items(), {self._state: writes.items})
            self._known[writes.general or writes] = known
        if self._state in known.writes or len(known.writes) >= STATES:
            return
        with PLANNING_LOCK:
            with written(known.before):
                first = capture()
            with self.in_place():
                now = capture()
        if not is_same_capture(first, now):
            raise CaptureError(
                f"what other calls leave in {self._where()} changes this one, but a captured step runs no Python: make "
                "it a buffer (register_buffer, a tensor) or an argument, or change it outside of forward"
            )
        known.writes[self._state] = now.writes.items

    def advance(self, writes: AttributeWrites) -> None:
        """Note that a captured call has run. With what it has written itself, it is known to be the same."""
        if not writes.items and not self._written:
            return
        known = self._known[writes.general or writes]
        items = writes.items if writes.general is not None else known.after(self._state)
        if all(item.place in self._written and self._written[item.place][0].token == item.token for item in items):
            return
        self._written |= {item.place: (item, item.found()) for item in items}
        self._note_state()
        known.writes.setdefault(self._state, items)

    def _forget_replaced(self) -> None:
        """Forget writes to places where the caller has put something else since."""
        replaced = [place for place, (item, found) in self._written.items() if not item.finds(found)]
        for place in replaced:
            del self._written[place]
        if replaced:
            self._note_state()

    def _note_state(self) -> None:
        self._state = frozenset((place, item.token) for place, (item, _) in self._written.items())

    def _items(self) -> list[AttributeWrite]:
        return [item for item, _ in self._written.values()]

    def _where(self) -> str:
        return ", ".join(dict.fromkeys(item.where for item in self._items()))
