"""Find the capture that fits a call whose lengths differ from those of the call it was made for.

keys of x: 8 x 128 and x: 8 x 120   ->   dimension 1 differs, and may be a symbol
the key with that symbol            ->   the capture that serves every length for which its trace holds
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from passes import Trace

from ...capture.sizes.size_capture import SizeCapture
from ...capture.sizes.size_inputs import SizeInputs, SizePlace, dense_stride
from ...graph.captured import Captured
from ...graph.guard_ops import is_condition
from ...guards.signature import ARGUMENTS
from ...runtime.step import Step
from ...tensors.traced_size import LEAST
from ..capture_cache import KnownLength, with_guard
from ..value_variants import Answers, answers_of, assumed, with_answers
from .general_steps import GeneralSteps

KEPT = 4  # general captures of one module
FAILED_KINDS = 64  # kinds of calls that are remembered because their lengths have to be constants
TRIES = 2  # the first two lengths may take different branches
SHAPE, STRIDES, ENTRIES = 2, 3, 7  # of a tensor in a key
LOG = logging.getLogger(__name__)

Key = Any  # ((guard, optimizer key), outputs that backward starts from)
Places = Mapping[SizePlace, int]


class SizeKeys:
    """The lengths of one module's calls: those that are symbols of a capture, and those that can't be."""

    def __init__(self) -> None:
        self._general: list[tuple[Key, Places, GeneralSteps]] = []  # the latest last
        self._failures: OrderedDict[Hashable, int] = OrderedDict()

    def rekey(self, grown: Callable[[Any], Hashable]) -> None:
        """Replace the guards in all keys."""
        self._general = [(with_guard(key, grown), places, steps) for key, places, steps in self._general]

    def captured(self, key: Key, steps: Sequence[tuple[Key, Step]]) -> KnownLength | None:
        """Return a general capture at the lengths of a call with this key; None if none serves it.

        The nearest length among `steps` that have a plan gives the times.
        """
        answers, key = answers_of(key), with_answers(key, ())
        for entry in reversed(self._general):
            general_key, places, general = entry
            lengths = _lengths(key, places)
            if lengths is None or _generalized(key, places) != general_key:
                continue
            if not _agrees(answers, general.capture.captured):
                continue
            if general.capture.trace.holds(lengths):
                self._general.remove(entry)
                self._general.append(entry)
                alike = [(other, step) for other, step in steps if _has_guards(step, general.capture.captured)]
                return KnownLength(general, lengths, _nearby(lengths, general_key, places, alike))
        return None

    def capture_for(self, key: Key, known: Iterable[tuple[Key, Captured]]) -> SizeCapture | None:
        """Return a capture of a call in which those lengths are symbols that alone differ from a `known` call;
        None if there is no such call, or their values are needed."""
        answers, key = answers_of(key), with_answers(key, ())
        for other, captured in known:
            other = with_answers(other, ())
            places = _differing(key, other) if other[1] == key[1] and _may_vary(captured) else {}
            lengths, earlier = _lengths(key, places), _lengths(other, places)
            if not places or lengths is None or earlier is None or not _agrees(answers, captured):
                continue
            general_key = _generalized(key, places)
            kind = general_key, assumed(captured.guards)
            if general_key != _generalized(other, places) or self._failures.get(kind, 0) >= TRIES:
                continue
            tensors = [leaf for leaf, entry in enumerate(key[0][0][ARGUMENTS]) if _is_tensor(entry)]
            return SizeCapture(SizeInputs(places, lengths, tensors), captured, earlier)
        return None

    def answers(self, key: Key, known: Iterable[tuple[Key, Captured]]) -> list[Answers]:
        """Return the answers of `known` captures of calls that differ from this one in lengths alone."""
        alike = ((with_answers(other, ()), captured) for other, captured in known)
        key = with_answers(key, ())
        return [
            assumed(captured.guards) for other, captured in alike
            if captured.guards and other[1] == key[1] and _may_vary(captured) and _differing(key, other)
        ]  # fmt: skip

    def note(self, key: Key, capture: SizeCapture) -> bool:
        """Keep what was captured for a call, and return True; or log why its lengths are constants."""
        general_key = _generalized(with_answers(key, ()), capture.inputs.places)
        if capture.general is not None:
            self._general.append((general_key, capture.inputs.places, GeneralSteps(capture.general)))
            del self._general[:-KEPT]
            return True
        kind = general_key, assumed(capture.earlier.guards)
        self._failures[kind] = self._failures.get(kind, 0) + 1
        while len(self._failures) > FAILED_KINDS:
            self._failures.popitem(last=False)
        LOG.info("lengths stay constants of the graph: %s", capture.reason)
        return False


def _may_vary(captured: Captured) -> bool:
    """Return True if lengths may be symbols in a capture like this: none that depends on numbers has them."""
    reads_numbers = captured.value_run_nbytes and not captured.guards
    depends = reads_numbers, captured.opaque, captured.float_values, captured.counters
    return all(map(is_condition, captured.guards)) and not any(depends)


def _agrees(answers: Answers, captured: Captured) -> bool:
    """Return True if a capture rests on these answers; empty where they are unknown."""
    return not answers or answers == assumed(captured.guards)


def _has_guards(step: Step, captured: Captured) -> bool:
    """Return True if a step rests on the same values, so that its ops are the same."""
    return assumed(step.parts.captured.guards) == assumed(captured.guards)


def _nearby(lengths: Sequence[int], general: Key, places: Places, steps: Sequence[tuple[Key, Step]]) -> Trace | None:
    """Return the priced trace of the nearest length with a plan."""
    traces: dict[int, Trace] = {}
    for key, step in steps:
        others = _lengths(key, places)
        key = with_answers(key, ())
        if step.report.plan and others is not None and _generalized(key, places) == general:
            distance = sum(abs(one - other) for one, other in zip(lengths, others, strict=True))
            traces.setdefault(distance, step.report.choice.captured.trace)
    return traces[min(traces)] if traces else None


def _differing(key: Key, other: Key) -> dict[SizePlace, int]:
    """Return a symbol for each size that differs between two guards; none if anything else differs.

    Sizes that were equal in both calls have one symbol.
    """
    guard, other_guard = key[0][0], other[0][0]
    if key[0][1] != other[0][1] or len(guard[ARGUMENTS]) != len(other_guard[ARGUMENTS]):
        return {}
    if any(guard[part] != other_guard[part] for part in range(len(guard)) if part != ARGUMENTS):
        return {}
    symbols: dict[tuple[int, int], int] = {}
    places: dict[SizePlace, int] = {}
    for leaf, (entry, before) in enumerate(zip(guard[ARGUMENTS], other_guard[ARGUMENTS], strict=True)):
        if entry == before:
            continue
        if not (_is_tensor(entry) and _is_tensor(before)) or len(entry[SHAPE]) != len(before[SHAPE]):
            return {}
        for dim, sizes in enumerate(zip(entry[SHAPE], before[SHAPE], strict=True)):
            if sizes[0] != sizes[1]:
                places[leaf, dim] = symbols.setdefault(sizes, len(symbols))
    return places


def _lengths(key: Key, places: Places) -> list[int] | None:
    """Return the length of each symbol in a call; None if the call has none, or several for one symbol."""
    arguments = key[0][0][ARGUMENTS]
    lengths: dict[int, int] = {}
    for (leaf, dim), symbol in places.items():
        entry = arguments[leaf] if leaf < len(arguments) else ()
        if not _is_tensor(entry) or dim >= len(entry[SHAPE]):
            return None
        size = entry[SHAPE][dim]
        if size < LEAST or lengths.setdefault(symbol, size) != size:
            return None
    return [lengths[symbol] for symbol in range(len(lengths))]


def _generalized(key: Key, places: Places) -> Key:
    """Return the key with any length in these places; `places` have to be of a call like it."""
    (guard, optimizer), *rest = key
    entries = list(guard[ARGUMENTS])
    for leaf in {leaf for leaf, _ in places}:
        entry = list(entries[leaf])
        symbols = [places.get((leaf, dim)) for dim in range(len(entry[SHAPE]))]
        entry[STRIDES] = _strides(entry[SHAPE], entry[STRIDES], symbols)
        entry[SHAPE] = tuple(
            size if symbol is None else ("length", symbol) for size, symbol in zip(entry[SHAPE], symbols, strict=True)
        )
        entries[leaf] = tuple(entry)
    parts = list(guard)
    parts[ARGUMENTS] = tuple(entries)
    return ((tuple(parts), optimizer), *rest)


def _strides(shape: Sequence[int], strides: Sequence[int], symbols: Sequence[int | None]) -> tuple[Hashable, ...]:
    """Return the strides, with a word for those that follow from the lengths."""
    spans = [any(symbol is not None for symbol in symbols[dim + 1 :]) for dim in range(len(shape))]
    return tuple(
        "dense" if spans[dim] and stride == dense_stride(shape, dim) else stride for dim, stride in enumerate(strides)
    )


def _is_tensor(entry: Any) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(entry, tuple) and len(entry) == ENTRIES
