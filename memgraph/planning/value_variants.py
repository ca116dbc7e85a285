"""The values under which a call was captured: each set of them has a step of its own.

    step for [True] fails with [False]   ->   the step for [False], if there is one, or a new capture

The latest set that held is tried first. After eight sets, the submodules that ask for the values run as they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any

from ..errors import CaptureError
from ..graph.guard_ops import GuardFailed, Scalars, ValueGuard, same_values

Answers = tuple[Scalars, ...]
Key = Any  # ((guard, (optimizer key, answers)), whether gradients exist, outputs that backward starts from)

NEW: Answers = ((float("inf"),),)  # no step has it: the call is captured with the values that it has now
CALLS = 256  # kinds of calls whose answers are remembered
MANY = 8  # sets of values of one call: then warn


class ValueVariants:
    """The answers of one module's captures, by call."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, list[Answers]] = OrderedDict()
        self._guards: dict[Hashable, tuple[ValueGuard, ...]] = {}  # of the latest capture
        self._asked: dict[Hashable, list[ValueGuard]] = {}  # those that differ, once there are many captures
        self._traced = set[Hashable]()  # calls whose submodules are all traced
        self._has_warned = False

    def rekey(self, grown: Callable[[Any], Hashable]) -> None:
        """Replace the guards in all kinds of calls."""

        def kind(old: Any) -> Hashable:
            return grown(old[0]), *old[1:]

        self._known = OrderedDict((kind(old), known) for old, known in self._known.items())
        self._guards = {kind(old): guards for old, guards in self._guards.items()}
        self._asked = {kind(old): guards for old, guards in self._asked.items()}
        self._traced = set(map(kind, self._traced))

    def latest(self, call: Key) -> Key:
        """Return the key of the step to try first."""
        known = self._known.get(_kind(call))
        return with_answers(call, known[0]) if known else call

    def others(
        self, call: Key, tried: Sequence[Sequence[ValueGuard]], failure: GuardFailed, alike: Iterable[Answers] = ()
    ) -> Key:
        """Return the key of a step that was not tried and agrees with what all guards have found, or of a new one.

        The answers of calls that are `alike` come after those of the call itself.
        """
        rejected = list(map(assumed, tried))
        found = (*rejected[-1][: failure.guard], failure.actual)
        for answers in chain(self._known.get(_kind(call), ()), alike):
            if answers not in rejected and _begins_with(answers, found):
                return with_answers(call, answers)
        return with_answers(call, NEW)

    def add(self, key: Key, guards: Sequence[ValueGuard]) -> Key:
        """Note the answers on which a step rests, and return its key."""
        key = with_answers(key, answers := assumed(guards))
        if answers:
            self._guards[_kind(key)] = tuple(guards)
            self.note_use(key, guards)
        return key

    def note_use(self, key: Key, guards: Sequence[ValueGuard]) -> None:
        """Note that a step has run: its answers are tried first next time."""
        if not guards:
            return
        known, answers = self._known.setdefault(_kind(key), []), assumed(guards)
        if known and known[0] == answers:
            return
        if answers in known:
            known.remove(answers)
        known.insert(0, answers)
        self._known.move_to_end(_kind(key))
        while len(self._known) > CALLS:
            kind, _ = self._known.popitem(last=False)
            for remembered in (self._guards, self._asked):
                remembered.pop(kind, None)

    def preferred(self, key: Key) -> tuple[str, ...]:
        """Return the submodules that had better run as they are in a new capture: those that ask for many values."""
        kind = _kind(key)
        if not is_new(key) or kind in self._traced or len(self._known.get(kind, ())) < MANY:
            return ()
        return paths_of(self._differing(kind))

    def trace_all(self, key: Key) -> None:
        """Prefer no submodule any more: with those that run as they are no plan fits."""
        self._traced.add(_kind(key))

    def warning(self, key: Key, opaque: Collection[str]) -> str:
        """Return a warning, once, if a call was captured for many sets of values; empty otherwise.

        The submodules `opaque` run as they are now.
        """
        known = self._known.get(_kind(key), ())
        if self._has_warned or len(known) <= MANY:
            return ""
        self._has_warned = True
        differing = self._differing(_kind(key))
        lines = "; ".join(f"{guard.where}: {guard.assumption}" for guard in differing[:3])
        begin = f"{len(known)} graphs were captured of calls that differ in values only, on which forward branches: "
        begin, again = f"{begin}{lines}", "each new value is captured and planned"
        advice = "compute with torch.where or a mask instead, or do this outside of the module"
        paths = paths_of(differing)
        if not paths:
            return f"{begin}; {again}: {advice}"
        if set(paths) <= set(opaque):
            return f"{begin}; from now on {_listed(paths)} in one op, as opaque={list(paths)} asks for at once"
        return f"{begin}; {again}: with opaque={list(paths)} {_listed(paths)} in one op; or {advice}"

    def _differing(self, kind: Hashable) -> list[ValueGuard]:
        """Return the guards of a capture whose values differ between captures; the last one if none does."""
        if kind not in self._asked:
            known, guards = self._known.get(kind, ()), self._guards.get(kind, ())
            shared = min(map(len, known), default=0)
            differing = [guard for guard in guards if guard.number < shared and _differ(known, guard.number)]
            self._asked[kind] = differing or list(guards[-1:])
        return self._asked[kind]


def with_answers(key: Key, answers: Answers) -> Key:
    """Return the key of the step that was captured with these answers."""
    (guard, (optimizer, _)), *rest = key
    return ((guard, (optimizer, answers)), *rest)


def answers_of(key: Key) -> Answers:
    """Return the answers in a key; none where they are unknown."""
    answers: Answers = key[0][1][1]
    return answers


def assumed(guards: Sequence[ValueGuard]) -> Answers:
    """Return the answers that a capture with these guards rests on."""
    return tuple(guard.expected for guard in guards)


def paths_of(guards: Sequence[ValueGuard]) -> tuple[str, ...]:
    """Return the submodules that ask for the values of these guards; those alone that are inside of no other."""
    paths = dict.fromkeys(guard.path for guard in guards if guard.path)
    return tuple(path for path in paths if not any(path.startswith(f"{other}.") for other in paths))


def _listed(paths: Sequence[str]) -> str:
    return f"{paths[0]} runs as it is," if len(paths) == 1 else f"{', '.join(paths)} run as they are, each"


def is_new(key: Key) -> bool:
    """Return True if a call has to be captured with the values that it has now."""
    return answers_of(key) == NEW


def refuse_unstable(key: Key, failure: GuardFailed) -> None:
    """
    Raises:
        CaptureError: a graph was captured with the values of this call, which has others when it runs.
    """
    if is_new(key):
        guard = failure.guards[failure.guard]
        if guard.op == "opaque":
            raise CaptureError(
                f"{guard.where} runs as it is, and gives results of another structure, shape or size when the same "
                "call runs twice: make them depend on tensors, attributes and generators only"
            )
        raise CaptureError(
            f"forward branches at {guard.where} on a value that is not the same when the same call runs twice: the "
            f"capture found {guard.expected}, and the step {failure.actual}; make it depend on tensors and torch's "
            "generators only, or compute it outside of the module"
        )


def _kind(key: Key) -> Hashable:
    (guard, (optimizer, _)), _, outputs = key
    return guard, optimizer, outputs


def _begins_with(answers: Answers, found: Answers) -> bool:
    return len(answers) >= len(found) and all(map(same_values, answers, found))


def _differ(known: Sequence[Answers], number: int) -> bool:
    return any(not same_values(answers[number], known[0][number]) for answers in known)
