"""What eager would have written to a module's attributes in the calls so far.

forward(9 rows): self.seen[9] = 0    ->   forward(7 rows) is captured with self.seen == {9: 0}

A step that is kept was captured before later calls wrote something. It is captured once more when it is called again,
and refused if the graph is another: which one is right depends on the order of calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager

from ..capture.python_state.side_effects import is_same_graph
from ..errors import CaptureError
from ..graph.captured import Captured
from ..guards.attribute_writes import AttributeWrite, written
from ..system.locks import PLANNING_LOCK

STATES = 5  # in which a kind of call may be known: if none of them changes it, no later one is expected to
CALLS = 256  # kinds of calls that are remembered

State = frozenset[tuple[Hashable, Hashable]]


class PendingWrites:
    """The writes of one module's calls, and with which of them each kind of call is known to have the same graph."""

    def __init__(self) -> None:
        self._writes: dict[Hashable, AttributeWrite] = {}
        self._state: State = frozenset()
        self._applied: dict[int, Sequence[AttributeWrite]] = {}
        self._known: OrderedDict[Hashable, tuple[Sequence[AttributeWrite], set[State]]] = OrderedDict()

    def in_place(self) -> AbstractContextManager[None]:
        """Put all that was written in place for a block."""
        return written(list(self._writes.values()))

    def note(self, call: Hashable) -> None:
        """Note that a kind of call has the graph of its capture with all that is written now."""
        self._known.setdefault(call, (list(self._writes.values()), set()))[1].add(self._state)
        self._known.move_to_end(call)
        while len(self._known) > CALLS:
            self._known.popitem(last=False)

    def add(self, call: Hashable, writes: Sequence[AttributeWrite]) -> None:
        """Note that a kind of call was captured that writes this, which does not change its own graph.

        A capture that serves another step has written before. Later runs would write the same.
        """
        self.note(call)
        if not writes or writes is self._applied.get(id(writes)):
            return
        self._applied[id(writes)] = writes
        self._writes |= {(id(write.owner()), write.key): write for write in writes}
        self._state = frozenset((place, write.token) for place, write in self._writes.items())
        self.note(call)

    def check(self, call: Hashable, capture: Callable[[], Captured]) -> None:
        """Make sure that what was written since a kind of call was captured does not change it.

        Raises:
            CaptureError: it does.
        """
        if not self._writes or call not in self._known:
            return
        writes, states = self._known[call]
        if self._state in states or len(states) >= STATES:
            return
        with PLANNING_LOCK:
            with written(writes):
                first = capture()
            with self.in_place():
                now = capture()
        if not _is_same(first, now):
            raise CaptureError(
                f"what other calls leave in {self._where()} changes this one, but a captured step runs no Python: make "
                "it a buffer (register_buffer, a tensor) or an argument, or change it outside of forward"
            )
        states.add(self._state)

    def _where(self) -> str:
        return ", ".join(dict.fromkeys(write.where for write in self._writes.values()))


def _is_same(first: Captured, now: Captured) -> bool:
    facts = [(each.inputs, each.outputs, repr(each.leaves), each.spec, each.differentiable) for each in (first, now)]
    return facts[0] == facts[1] and is_same_graph(first.graph, now.graph)
