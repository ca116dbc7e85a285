"""What the caller of `compile`, `plan` or `sweep` asked for, checked and in the words of the planner.

    budget="8GB", time_limit=None, wire_dtype=torch.bfloat16   ->   Wishes("8GB", seconds=inf, wire="bf16")

What depends on the model is checked with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from os import PathLike

import torch

from .lower import LOWER
from .saved import Saved, SavedPlan, saved_plans
from .slab import pinned_nbytes
from .spill import spill_folder
from .wire import wire_name

Budget = str | int | float | None


@dataclass(frozen=True)
class Wishes:
    """What the caller asked for; see `memgraph.compile`."""

    budget: Budget
    optimizer: torch.optim.Optimizer | None = None
    offload: str | None = "auto"
    spill_dir: str | PathLike[str] | None = None
    plans: tuple[SavedPlan, ...] = ()
    seconds: float = math.inf  # after which planning takes what it has
    fuse: bool = False  # updates run in backward
    wire: str = ""  # the type that values may be cast to for their way to the far tier
    lower: str | None = None  # what compiles parts of the step
    strict: bool = False  # the allocator refuses more than the budget
    hosts: bool = False  # the host may update states that live there
    pinned: int | None = None  # bytes of the host's memory that may be pinned in all
    graphs: bool | str = False  # whether steps are recorded as CUDA graphs


def wishes(
    budget: Budget, optimizer: torch.optim.Optimizer | None, offload: str | None,
    spill_dir: str | PathLike[str] | None, plan: Saved | Sequence[Saved] | None, time_limit: float | None,
    wire_dtype: torch.dtype | None, fuse_update: bool, lower: str | None, strict: bool = False,
    host_update: bool = False, pinned: Budget = None, cuda_graphs: bool | str = False,
) -> Wishes:  # fmt: skip
    """What the arguments of `compile` mean; errors as there."""
    wire, plans, seconds = wire_name(wire_dtype), saved_plans(plan), seconds_of(time_limit)
    if lower not in LOWER:
        raise ValueError(f"lower={lower!r}; give one of {', '.join(map(repr, LOWER))}")
    if cuda_graphs not in (False, True, "auto"):
        raise ValueError(f'cuda_graphs={cuda_graphs!r}; give True, False or "auto"')
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer")
    if optimizer is None and fuse_update:
        raise ValueError("fuse_update=True wants the optimizer whose update it is; give optimizer=")
    if optimizer is None and host_update:
        raise ValueError("host_update=True wants the optimizer that steps there; give optimizer=")
    if fuse_update and host_update:
        raise ValueError(
            "host_update=True lets the host step once backward has ended, and fuse_update=True updates in backward: "
            "give one of them"
        )
    if spill_dir is not None:
        if not isinstance(spill_dir, str | PathLike):
            raise TypeError(f"spill_dir is a {type(spill_dir).__name__}; give the path of a folder")
        spill_folder(spill_dir)
    most = pinned_nbytes(pinned)
    return Wishes(
        budget, optimizer, offload, spill_dir, plans, seconds, fuse_update, wire, lower, strict, host_update, most,
        cuda_graphs,
    )  # fmt: skip


def seconds_of(time_limit: float | None) -> float:
    """The seconds that a time limit means.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, or not a number.
    """
    if time_limit is None:
        return math.inf
    if isinstance(time_limit, bool) or not isinstance(time_limit, Real):
        raise TypeError(f"time_limit is a {type(time_limit).__name__}, {time_limit!r}; give seconds, or None for none")
    if not time_limit >= 0:
        raise ValueError(f"time_limit={time_limit!r}; give seconds, 0 for the quickest plan, or None for no limit")
    return float(time_limit)
