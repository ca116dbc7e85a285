"""Which way a kernel runs: Triton's, in one of a few shapes, or its twin in plain torch.

    measured("cast", cuda, trial)    times them all for a few sizes, once, and keeps what was fastest with the costs
    way_of("cast", cuda, 4 << 20)    Way(block=2048, warps=8), or None: the twin

Nothing is measured in a step, whose bytes are planned: what was not measured before it runs as the twin.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..system.measurement_cache import measure_once
from ..system.setting import environment_key
from ..system.timer import shortest_us

SIZES = (64 << 10, 1 << 20, 16 << 20, 128 << 20)  # bytes that are read


@dataclass(frozen=True)
class Way:
    """The numbers that a program takes at once, its warps, and the most programs; 0: as many as there is work for."""

    block: int
    warps: int = 4
    programs: int = 0

    def grid(self, work: int) -> int:
        """How many programs are started for so much work."""
        return min(work, self.programs) if self.programs else work

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told of it."""
        # A product and a sum are two roundings in torch, and shall be two here.
        return {"BLOCK": self.block, "num_warps": self.warps, **({} if interpreted() else {"enable_fp_fusion": False})}


WAYS = (Way(1024, 4), Way(2048, 4), Way(2048, 8), Way(4096, 8), Way(8192, 16))
Trial = Callable[[int, Way | None], Callable[[], object]]  # for so many bytes: what runs a way
Found = dict[int, Way | None]

_known: dict[str, Found] = {}


def interpreted() -> bool:
    """Whether Triton's kernels run in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def launch(kernel: Any, way: Way, work: int, device: torch.device, *args: object, **constants: object) -> None:
    """Run a kernel on `device`; Triton takes the current one, whatever it is given."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[way.grid(work),](*args, **constants, **way.options)


def way_of(kernel: str, device: torch.device, nbytes: int) -> Way | None:
    """The fastest way for so many bytes, as far as that was measured."""
    found = _known.get(_key(kernel, device)) if device.type == "cuda" else None
    if not found:
        return None
    return found[max((size for size in found if size <= nbytes), default=min(found))]


def measured(kernel: str, device: torch.device, trial: Trial) -> Found:
    """The fastest way for each of a few sizes, measured once; on a CPU there is nothing to choose."""
    if device.type != "cuda":
        return {}
    return measure_once(_known, _key(kernel, device), partial(_measure, device, trial), _read, _written)


def _key(kernel: str, device: torch.device) -> str:
    # "cuda" is the current one, by whose number its tensors know it.
    number = torch.cuda.current_device() if device.index is None else device.index
    return f"way {kernel} {SIZES} {WAYS} {device.type}:{number} {environment_key(device)}"


def _measure(device: torch.device, trial: Trial) -> Found:
    return {nbytes: fastest(device, nbytes, trial) for nbytes in SIZES}


def fastest(device: torch.device, nbytes: int, trial: Trial) -> Way | None:
    """The way of the least time, each having run once before."""
    times: dict[Way | None, float] = {}
    for way in (None, *WAYS):
        run = trial(nbytes, way)
        run()
        times[way] = shortest_us(run, device)
    return min(times, key=lambda way: times[way])


def _read(kept: Any) -> Found:
    return {nbytes: Way(*way) if way else None for nbytes, way in kept}


def _written(found: Found) -> object:
    return [(nbytes, (way.block, way.warps, way.programs) if way else None) for nbytes, way in found.items()]
