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

from ..guards.signature import kernel_modes
from ..system.device import CPU
from ..system.measurement_cache import measure_once
from ..system.setting import environment_key
from ..system.timer import flush_caches, shortest_us
from .host_step import stepper_on_host
from .optimizer_clone import ClonedOptimizer, has_begun
from .optimizer_profiler import sorted_options
from .state_parts import StatePart

_known: dict[str, float] = {}  # microseconds for an element


def stepping(optimizer: optim.Optimizer, parts: Sequence[StatePart], nbytes: int) -> float:
    """Bytes of the states of all `parts` that the host steps per microsecond, in windows of `nbytes`; 0.0 for none."""
    groups = {parameter: i for i, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    counts = Counter[tuple[int, torch.dtype]]()
    for parameter in (parameter for part in parts for parameter in part.parameters):
        counts[groups[parameter], parameter.dtype] += parameter.numel()
    stepper = stepper_on_host(optimizer)
    us = sum(count * _element_us(stepper, *kind, nbytes) for kind, count in counts.items())
    return sum(part.nbytes for part in parts) / us if us else 0.0


def _element_us(stepper: ClonedOptimizer, group: int, dtype: torch.dtype, nbytes: int) -> float:
    kind = f"{type(stepper.optimizer)} {sorted_options(stepper.options[group])} {dtype}"
    key = f"host step {kind} {nbytes} {kernel_modes()} {environment_key(CPU)}"
    return measure_once(_known, key, lambda: _measure(stepper, group, dtype, nbytes), float, float)


def _measure(stepper: ClonedOptimizer, group: int, dtype: torch.dtype, nbytes: int) -> float:
    states = sum(state.itemsize for state in stepper.entries(group, dtype).values() if state)
    count = max(1, nbytes // (2 * dtype.itemsize + states))
    piece = torch.zeros(count, dtype=dtype)
    piece.grad = torch.zeros_like(piece)
    (state,) = stepper.step([(group, piece, has_begun(stepper.optimizer, stepper.options[group], piece))])
    us = shortest_us(partial(stepper.step, [(group, piece, state or {})]), CPU, flush_caches(CPU))
    return us / count
