"""How fast the host steps an optimizer on states that live there.

    AdamW, windows of 16 MB of float32   ->   8900 bytes of states per microsecond

A window of made-up parameters is stepped, in memory that no cache has, and the time is kept with the costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import optim

from .costs import once
from .device import CPU
from .host_step import alone_on_host
from .pointwise import Alone
from .setting import setting
from .signature import kernel_modes
from .state_parts import StatePart
from .stopwatch import cool, shortest
from .update import sorted_options

_known: dict[str, float] = {}  # microseconds for an element


def stepping(optimizer: optim.Optimizer, parts: Sequence[StatePart], nbytes: int) -> float:
    """Bytes of the states of all `parts` that the host steps per microsecond, in windows of `nbytes`; 0.0 for none."""
    groups = {parameter: i for i, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    counts = Counter[tuple[int, torch.dtype]]()
    for parameter in (parameter for part in parts for parameter in part.parameters):
        counts[groups[parameter], parameter.dtype] += parameter.numel()
    alone = alone_on_host(optimizer)
    us = sum(count * _element_us(alone, *kind, nbytes) for kind, count in counts.items())
    return sum(part.nbytes for part in parts) / us if us else 0.0


def _element_us(alone: Alone, group: int, dtype: torch.dtype, nbytes: int) -> float:
    kind = f"{type(alone.optimizer)} {sorted_options(alone.options[group])} {dtype}"
    key = f"host step {kind} {nbytes} {kernel_modes()} {setting(CPU)}"
    return once(_known, key, lambda: _measure(alone, group, dtype, nbytes), float, float)


def _measure(alone: Alone, group: int, dtype: torch.dtype, nbytes: int) -> float:
    states = sum(state.itemsize for state in alone.entries(group, dtype).values() if state)
    count = max(1, nbytes // (2 * dtype.itemsize + states))
    piece = torch.zeros(count, dtype=dtype)
    piece.grad = torch.zeros_like(piece)
    (state,) = alone.step([(group, piece, {})])
    us = shortest(partial(alone.step, [(group, piece, state or {})]), CPU, cool(CPU))
    return us / count
