"""A disk that plans take for fast, so that stages offload instead of recomputing.

patched(patch)     # a MonkeyPatch: each copy is forecast to take nearly no time; copies are real
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memgraph.storage.io_threads import STAGING
from passes import Machine
from passes.ir.machine import Link

FAST = Link(out=1e6, back=1e6, us_per_byte=1e-9, staging=STAGING, half_duplex=True, capacity=1 << 40)


def patched(patch: pytest.MonkeyPatch) -> None:
    """Let ranks of a pipeline measure a fast disk."""

    def measured(machine: Machine, tier: str | None, *_: Any, **__: Any) -> Machine:
        return replace(machine, tier=tier or "", link=FAST)

    patch.setattr("memgraph.stages.step_capture.measure_links", measured)
