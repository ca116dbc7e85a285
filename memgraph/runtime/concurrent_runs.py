"""Runs that are open at the same time over the same parameters: one backward may go through several of them.

    a, b = q(x), q(y); (a - b).square().mean().backward()

Eager adds the sum of all their gradients to `.grad`, grad + (b's + a's).  So no run may add its own.
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
_open: list[tuple[weakref.ref[StepRun], frozenset[int]]] = []  # each run with the ids of its parameters
_waiting = 0  # bytes of gradients that autograd holds for open runs until the running backward ends


def concurrent_runs(parameters: Iterable[Tensor], but: StepRun | None = None) -> list[StepRun]:
    """Return the runs that wait for backward and share one of these parameters, without `but`."""
    with _LOCK:
        others = _waiting_runs()
        wanted = set(map(id, parameters)) if others else set()
        return [run for run, ids in others if run is not but and not ids.isdisjoint(wanted)]


def _waiting_runs() -> list[tuple[StepRun, frozenset[int]]]:
    return [(run, ids) for ref, ids in _open if (run := ref()) is not None and run.saved is not None]


def held_nbytes(runs: Iterable[StepRun], own: Iterable[Tensor]) -> int:
    """Return the bytes on the device that open runs hold until backward, without the storages of `own`: their saved
    tensors, and their inputs and outputs that still exist."""
    held = [tensor for run in runs for tensor in (*run.saved_tensors(), *run.caller_tensors())]
    own_addresses = {tensor.untyped_storage().data_ptr() for tensor in own}
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held if not is_offloaded(x)}
    return sum(nbytes for address, nbytes in sizes.items() if address not in own_addresses)


def waiting_nbytes() -> int:
    """Return the bytes of gradients that backward has made for several runs, and that autograd has yet to sum."""
    return _waiting


def count_passed_on(gradients: Sequence[Tensor]) -> None:
    """Count gradients that autograd holds until the running backward ends."""
    # Not by their storages: autograd adds out of place, which takes more, to a gradient whose storage was asked for.
    nbytes = sum(gradient.nbytes for gradient in gradients if not is_offloaded(gradient))

    def ended() -> None:
        _wait(-nbytes)

    _wait(nbytes)
    torch.autograd.Variable._execution_engine.queue_callback(ended)


def _wait(nbytes: int) -> None:
    global _waiting
    with _LOCK:
        _waiting += nbytes


def note_concurrent_run(run: StepRun, parameters: frozenset[int]) -> None:
    """Register a run that waits for backward, and mark all runs that share a parameter with it."""
    with _LOCK:
        others = _waiting_runs()
        for other, ids in others:
            if not ids.isdisjoint(parameters):
                other.is_concurrent = run.is_concurrent = True
        # Runs that were dropped, or whose backward has run, leave the list here.
        _open[:] = [*((weakref.ref(other), ids) for other, ids in others), (weakref.ref(run), parameters)]
