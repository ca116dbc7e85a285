"""Seeds that a part takes from the system's entropy, and takes again when its forward runs again.

with entropy_seeds() as seeds: torch.seed()      ->   7210, and seeds == [7210]
with entropy_seeds([7210]): torch.seed()         ->   7210
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def entropy_seeds(known: Sequence[int] = ()) -> Iterator[list[int]]:
    """Let `torch.seed` of this thread give the known seeds first, and yield all that it gives in the block.

    The seeds that a GPU's generator takes by itself are not known, so a part that asks for them can't be run again.
    """
    plain, thread, left = torch.seed, threading.get_ident(), list(known)
    given: list[int] = []

    def seed() -> int:
        if threading.get_ident() != thread:
            return plain()
        if left:
            torch.manual_seed(left[0])
        given.append(left.pop(0) if left else plain())
        return given[-1]

    with mock.patch.object(torch, "seed", seed), mock.patch.object(torch.random, "seed", seed):
        yield given
