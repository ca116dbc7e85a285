"""Choose how an operation runs on a GPU: by its Triton kernel in one of a few shapes, or by its fallback in torch.

    tune("cast", cuda, trial)           time all of them for a few sizes, once, and keep the fastest in the cache
    best_config("cast", cuda, 4 << 20)  LaunchConfig(block=2048, warps=8), or None: the fallback

Nothing is measured within a step, whose bytes are planned: what was not measured before runs the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
class LaunchConfig:
    """The numbers that a program processes at once, and its warps."""

    block: int
    warps: int = 4

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of a launch."""
        return {"BLOCK": self.block, "num_warps": self.warps}


CONFIGS = (
    *(LaunchConfig(1024, 4), LaunchConfig(2048, 4), LaunchConfig(2048, 8), LaunchConfig(4096, 8)),
    LaunchConfig(8192, 16),
)
TrialFactory = Callable[[int, LaunchConfig | None], Callable[[], object]]  # bytes, config -> one run
ConfigTable = dict[int, LaunchConfig | None]

_tuned: dict[str, ConfigTable] = {}  # what this process has measured or read from the cache


def launch(
    kernel: Any, config: LaunchConfig, programs: int, device: torch.device, *args: object, **constants: object
) -> None:
    """Run a kernel on `device`; Triton would take the current one."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[programs,](*args, **constants, **config.options)


def best_config(kernel: str, device: torch.device, nbytes: int) -> LaunchConfig | None:
    """Return the fastest config for so many bytes, as far as it was measured."""
    if device.type != "cuda":
        return None
    keys = (_key(kernel, device, SIZES[:count]) for count in range(len(SIZES), 0, -1))
    table = next((_tuned[key] for key in keys if key in _tuned), {})
    return table[max((size for size in table if size <= nbytes), default=min(table))] if table else None


def tune(kernel: str, device: torch.device, trial: TrialFactory, room: int | None = None) -> ConfigTable:
    """Measure the fastest config for each of a few sizes, once; on a CPU there is nothing to choose.

    Args:
        room: bytes of the device that measuring may use. Sizes that do not fit twice are left out.
    """
    sizes = tuple(nbytes for nbytes in SIZES if room is None or 2 * nbytes <= room)
    if device.type != "cuda" or not sizes:
        return {}
    measure = partial(_measure, device, trial, sizes)
    return measure_once(_tuned, _key(kernel, device, sizes), measure, _from_json, _to_json)


def _key(kernel: str, device: torch.device, sizes: Sequence[int]) -> str:
    # "cuda" means the current device, and tensors know its number.
    number = torch.cuda.current_device() if device.index is None else device.index
    return f"config {kernel} {sizes} {CONFIGS} {device.type}:{number} {environment_key(device)}"


def _measure(device: torch.device, trial: TrialFactory, sizes: Sequence[int]) -> ConfigTable:
    return {nbytes: _fastest(device, nbytes, trial) for nbytes in sizes}


def _fastest(device: torch.device, nbytes: int, trial: TrialFactory) -> LaunchConfig | None:
    times: dict[LaunchConfig | None, float] = {}
    for config in (None, *CONFIGS):
        run = trial(nbytes, config)
        run()  # compiles
        times[config] = shortest_us(run, device)
    return min(times, key=lambda config: times[config])


def _from_json(rows: Any) -> ConfigTable:
    return {nbytes: LaunchConfig(*config) if config else None for nbytes, config in rows}


def _to_json(table: ConfigTable) -> object:
    return [(nbytes, (config.block, config.warps) if config else None) for nbytes, config in table.items()]
