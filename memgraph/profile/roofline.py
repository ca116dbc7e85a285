"""Estimate the time of an op that can't be run from its flops and bytes.

    mm f32[8192, 8192] x f32[8192, 8192]   ->   max(1.1e12 flops / flops per us, 805 MB / bytes per us)

The rates of the device are measured once, by a matmul and a copy, and cached.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from ..graph.nodes import tensors
from ..guards.signature import kernel_modes
from ..system.measurement_cache import measure_once
from ..system.setting import environment_key
from ..system.timer import shortest_us

SIDE, SIDE_GPU = 768, 4096  # of the matrices that are multiplied: large enough for the whole device
COPIED, COPIED_GPU = 32 << 20, 256 << 20  # bytes: more than caches hold
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Rates:
    """Flops, and bytes read or written, per microsecond."""

    flops: float = 20_000.0
    nbytes: float = 5_000.0


_known: dict[str, Rates] = {}


def roofline(node: fx.Node, nbytes: int, limit: int) -> float:
    """Return the microseconds of an op that reads and writes `nbytes`.

    The device's rates are guessed if measuring them would need more than `limit` bytes.
    """
    values = _values(node)
    device = values[0].device if values else torch.device("cpu")
    rates = measured_rates(device, computed_dtype(node)) if limit >= 2 * _sizes(device)[1] else Rates()
    return round(roofline_us(node, nbytes, rates), 1)


def roofline_us(node: fx.Node, nbytes: int, rates: Rates) -> float:
    """Return the microseconds of an op that reads and writes `nbytes`, on a device with these rates."""
    return max(flops(node) / rates.flops, nbytes / rates.nbytes)


def computed_dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype that an op computes in."""
    return next((value.dtype for value in _values(node) if value.dtype in DTYPES), torch.float32)


def _values(node: fx.Node) -> list[Tensor]:
    return [value for source in (node, *node.all_input_nodes) for value in tensors(source)]


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return the rates of a device that is here, measured at first use."""
    key = f"rates {dtype} {device} {kernel_modes()} {environment_key(device)}"
    return measure_once(_known, key, lambda: _measure(device, dtype), lambda cached: Rates(*cached), astuple)


def flops(node: fx.Node) -> float:
    """Return the op's floating point operations; 0 if torch does not count them."""
    count: Any = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0.0
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda read: read.meta.get("val"))
    try:
        return float(count(*args, **kwargs, out_val=node.meta.get("val")))
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError, RuntimeError):
        return 0.0  # the formula does not support this form of the op


def _sizes(device: torch.device) -> tuple[int, int]:
    """Return the side of the matrices, and the bytes that are copied."""
    return (SIDE_GPU, COPIED_GPU) if device.type == "cuda" else (SIDE, COPIED)


def _measure(device: torch.device, dtype: torch.dtype) -> Rates:
    with torch.no_grad(), torch._C._DisableAutocast():
        side, copied = _sizes(device)
        # One after the other: both at once would exceed the limit.
        return Rates(2 * side**3 / _multiply_us(side, dtype, device), 2 * copied / _copy_us(copied, device))


def _multiply_us(side: int, dtype: torch.dtype, device: torch.device) -> float:
    multiply = partial(_multiply, torch.full((side, side), 0.5, dtype=dtype, device=device))
    multiply()
    return shortest_us(multiply, device)


def _copy_us(nbytes: int, device: torch.device) -> float:
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    copy = partial(target.copy_, source)
    copy()
    return shortest_us(copy, device)


def _multiply(matrix: Tensor) -> Tensor:
    return matrix @ matrix
