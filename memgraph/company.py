"""Flights that are open at the same time over the same parameters: one backward may go through several of them.

    a, b = q(x), q(y); (a - b).square().mean().backward()

Eager adds what comes from all of them to `.grad` at once, grad + (b's + a's).  So none of them may add by itself.
"""

from __future__ import annotations

import threading
import weakref

from .flight import Flight

_LOCK = threading.Lock()
_open: list[tuple[weakref.ref[Flight], frozenset[int]]] = []  # with the parameters of each, by id


def join(flight: Flight, parameters: frozenset[int]) -> None:
    """The backward of `flight` is outstanding from now on; whoever else's is, over one of its parameters, shares."""
    with _LOCK:
        there = [(other, theirs) for ref, theirs in _open if (other := ref()) is not None and other.saved is not None]
        for other, theirs in there:
            if not theirs.isdisjoint(parameters):
                other.shared = flight.shared = True
        # A flight that was dropped, or has been through its backward, is none of them.
        _open[:] = [*((weakref.ref(other), theirs) for other, theirs in there), (weakref.ref(flight), parameters)]
