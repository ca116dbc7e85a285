"""Cast dense tensors between float32 and bfloat16 in one pass on a GPU.

    cast_copy(f32[8, 4], bf16)   ->  bf16[8, 4] with the same strides, rounded to the nearest, nothing made infinite
    cast_copy(bf16[8, 4], f32)   ->  f32[8, 4], exactly

Numbers are rounded in integers, so the bits equal those of `storage/wire_cast.py` on every machine. Unlike it, the
kernel never waits for the device to report whether a range overflows.

Choose how an operation runs on a GPU: by its Triton kernel in one of a few shapes, or by its fallback in torch.

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
import triton
import triton.language as tl
from torch import Tensor

from ..system.measurement_cache import measure_once
from ..system.setting import environment_key
from ..system.timer import shortest_us
from ..tensors.layout import flat

CODES = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16}  # the integers that hold the bits
SIZES = (64 << 10, 1 << 20, 16 << 20, 128 << 20)  # bytes that are read


def cast_copy(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return a copy of a dense tensor with the same strides, or None where the kernel was not measured to be faster.

    Raises:
        ValueError: `x` has gaps or overlaps.
    """
    config = best_config("cast", x.device, x.nbytes)
    return None if config is None else cast_by(config, x, dtype)


def cast_by(config: LaunchConfig, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast by the kernel in a shape of the caller's choice."""
    copy = torch.empty_like(x, dtype=dtype)
    if count := x.numel():
        codes, copied = flat(x).view(CODES[x.dtype]), flat(copy).view(CODES[dtype])
        launch(_kernel, config, -(-count // config.block), x.device, codes, copied, count, WIDEN=dtype is torch.float32)
    return copy


def tune_cast(device: torch.device, fallback: Callable[[Tensor], Tensor], room: int | None = None) -> ConfigTable:
    """Find what casts float32 to bfloat16 fastest, in `room` bytes: `fallback` or one of the kernel's shapes."""

    def trial(nbytes: int, config: LaunchConfig | None) -> Callable[[], object]:
        x = torch.zeros(nbytes // 4, device=device)
        return partial(fallback, x) if config is None else partial(cast_by, config, x, torch.bfloat16)

    return tune("cast", device, trial, room)


@triton.jit
def _kernel(codes, copied, count, WIDEN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    bits = tl.load(codes + i, mask=inside)
    if WIDEN:
        tl.store(copied + i, bits.to(tl.uint32) << 16, mask=inside)
    else:
        size = bits & 0x7FFFFFFF
        # To the nearest, of two equally near numbers to the even one; at most the largest finite number.
        nearest = tl.minimum((size + 0x7FFF + ((size >> 16) & 1)) >> 16, 0x7F7F)
        code = tl.where(size == 0x7F800000, 0x7F80, tl.where(size > 0x7F800000, 0x7FC0, nearest))
        tl.store(copied + i, (code | ((bits >> 31) << 15)).to(tl.uint16), mask=inside)


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
