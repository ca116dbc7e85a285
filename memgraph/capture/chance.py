"""Random numbers while a step is traced: torch draws none, and what Python draws would be the same in every step.

A module that asks `random` or numpy (for a layer to drop, for spans to mask) would be captured with that one answer.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import CaptureError


@contextmanager
def refuse_python_random() -> Iterator[None]:
    """All global generators are afterwards as they were; if one of Python's was used, that is an error."""
    python, numpy = random.getstate(), _numpy()
    before = numpy.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=()):
            yield
        if random.getstate() != python or (numpy and not _same(numpy.get_state(), before)):
            raise CaptureError(
                "forward draws random numbers with `random` or numpy, which would be the same in every step: draw them "
                "with torch, or outside of the module"
            )
    finally:
        random.setstate(python)
        if numpy:
            numpy.set_state(before)


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _same(now: Any, before: Any) -> bool:
    return all((a == b).all() if hasattr(a, "all") else a == b for a, b in zip(now, before, strict=True))
