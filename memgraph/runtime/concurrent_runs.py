"""Flights that are open at the same time over the same parameters: one backward may go through several of them.

    a, b = q(x), q(y); (a - b).square().mean().backward()

Eager adds what comes from all of them to `.grad` at once, grad + (b's + a's).  So none of them may add by itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..storage.mapped_storage import is_offloaded
from .step_run import StepRun

_LOCK = threading.Lock()
_open: list[tuple[weakref.ref[StepRun], frozenset[int]]] = []  # with the parameters of each, by id
_waiting = 0  # bytes of gradients that autograd has of open flights, until the backward that made them ends


def concurrent_runs(parameters: Iterable[Tensor], flight: StepRun | None = None) -> list[StepRun]:
    """The flights, but for this one, over one of these parameters whose backward is outstanding."""
    with _LOCK:
        there = [(other, theirs) for ref, theirs in _open if (other := ref()) is not None and other.saved is not None]
        mine = set(map(id, parameters)) if there else set()
        return [other for other, theirs in there if other is not flight and not theirs.isdisjoint(mine)]


def held_nbytes(flights: Iterable[StepRun], own: Iterable[Tensor]) -> int:
    """The bytes of the device that open flights hold until their backward, but for those of tensors of one's `own`:
    what they have saved, and what of their inputs and outputs is still there."""
    held = [tensor for flight in flights for tensor in (*(flight.saved or ()), *flight.handed())]
    mine = {tensor.untyped_storage().data_ptr() for tensor in own}
    found = {
        storage.data_ptr(): storage.nbytes() for storage in (x.untyped_storage() for x in held if not is_offloaded(x))
    }
    return sum(nbytes for address, nbytes in found.items() if address not in mine)


def waiting_nbytes() -> int:
    """The bytes of gradients that backward has made for several flights, and that autograd has yet to sum."""
    return _waiting


def passed_outputs(gradients: Sequence[Tensor]) -> None:
    """Count gradients that autograd holds until the running backward ends."""
    nbytes = sum(gradient.untyped_storage().nbytes() for gradient in gradients if not is_offloaded(gradient))

    def ended() -> None:
        _wait(-nbytes)

    _wait(nbytes)
    torch.autograd.Variable._execution_engine.queue_callback(ended)


def _wait(nbytes: int) -> None:
    global _waiting
    with _LOCK:
        _waiting += nbytes


def note_concurrent_run(flight: StepRun, parameters: frozenset[int]) -> None:
    """The backward of `flight` is outstanding from now on; whoever else's is, over one of its parameters, shares."""
    with _LOCK:
        there = [(other, theirs) for ref, theirs in _open if (other := ref()) is not None and other.saved is not None]
        for other, theirs in there:
            if not theirs.isdisjoint(parameters):
                other.shared = flight.shared = True
        # A flight that was dropped, or has been through its backward, is none of them.
        _open[:] = [*((weakref.ref(other), theirs) for other, theirs in there), (weakref.ref(flight), parameters)]
