"""What the caller of `compile`, `plan` or `sweep` asked for, checked and in the words of the planner.

    budget="8GB", time_limit=None, wire_dtype=torch.bfloat16
    ->   CompileOptions("8GB", time_limit=inf, wire_dtype="bf16")

What depends on the model is checked with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import Any

import torch

from ..report.saved_plan import SavedPlan, saved_plan
from ..storage.pinned_pool import pinned_nbytes
from ..storage.spill_file import spill_folder
from ..storage.wire_cast import wire_name
from ..tensors.loss_outputs import OutputSelector, select_all, select_losses
from .argument_rules import check_argument

Budget = str | int | float | None


@dataclass(frozen=True)
class CompileOptions:
    """What the caller asked for; see `memgraph.compile`."""

    budget: Budget
    _: KW_ONLY
    optimizer: torch.optim.Optimizer | None = None
    offload: str | None = "auto"
    spill_dir: str | PathLike[str] | None = None
    plans: tuple[SavedPlan, ...] = ()
    time_limit: float = math.inf  # after which planning takes what it has
    fuse_update: bool = False  # updates run in backward
    wire_dtype: str = ""  # the type that values may be cast to for their way to the far tier
    lower: str | None = None  # what compiles parts of the step
    strict: bool = False  # the allocator refuses more than the budget
    host_update: bool = False  # the host may update states that live there
    pinned: int | None = None  # bytes of the host's memory that may be pinned in all
    accumulate: bool | None = None  # whether gradients may be there to be added to; None if that is yet to be seen
    forwards: int = 1  # that are open at once
    cuda_graphs: bool | str = False  # whether steps are recorded as CUDA graphs

    @property
    def search_key(self) -> tuple[object, ...]:
        """What a search depends on beside the step and the machine."""
        planned = self.time_limit, self.forwards, self.offload, self.fuse_update, self.wire_dtype, self.lower
        return *planned, self.host_update, self.pinned, self.cuda_graphs

    @property
    def wanted(self) -> OutputSelector:
        """From which outputs the first plan lets backward start; from all, where forwards are open together, since
        their loss is made of what several of them return, beside the scalars."""
        return select_losses if self.forwards == 1 else select_all


def parse_options(budget: Budget, **given: Any) -> CompileOptions:
    """What the arguments of `compile`, by their names, mean; errors as there."""
    own = {name: check_argument(name, value) for name, value in {"budget": budget, **given}.items() if name != "plan"}
    _refuse_mixed(own, given.get("plan") is not None)
    if own["spill_dir"] is not None:
        spill_folder(own["spill_dir"])
    return CompileOptions(
        own["budget"],
        optimizer=own["optimizer"],
        offload=own["offload"],
        spill_dir=own["spill_dir"],
        plans=_plans(given.get("plan")),
        time_limit=math.inf if own["time_limit"] is None else own["time_limit"],
        fuse_update=own["fuse_update"],
        wire_dtype=wire_name(own["wire_dtype"]),
        lower=own["lower"],
        strict=own.get("strict", False),
        host_update=own["host_update"],
        forwards=own["forwards"],
        accumulate=own["accumulate"],
        pinned=pinned_nbytes(own["pinned"]),
        cuda_graphs=own["cuda_graphs"],
    )


def _refuse_mixed(own: Mapping[str, Any], plans: bool) -> None:
    """Raise what is wrong with arguments that are right each by itself."""
    optimizer, fuses, hosts = own["optimizer"], own["fuse_update"], own["host_update"]
    if own["forwards"] > 1 and (fuses or own["cuda_graphs"] is True or plans):
        raise ValueError(
            "forwards= lets several forwards be open at once, which fuse_update=True, cuda_graphs=True and saved plans "
            "do not know of: leave out one of them"
        )
    if optimizer is None and fuses:
        raise ValueError("fuse_update=True wants the optimizer whose update it is; give optimizer=")
    if optimizer is None and hosts:
        raise ValueError("host_update=True wants the optimizer that steps there; give optimizer=")
    if fuses and own["accumulate"]:
        raise ValueError(
            "accumulate=True adds to gradients, and fuse_update=True leaves none to be added to: give one of them"
        )
    if fuses and hosts:
        raise ValueError(
            "host_update=True lets the host step once backward has ended, and fuse_update=True updates in backward: "
            "give one of them"
        )


def _plans(given: object) -> tuple[SavedPlan, ...]:
    """The saved plans that were given: one, several or none."""
    several = () if given is None else given if isinstance(given, list | tuple) else (given,)
    return tuple(saved_plan(check_argument("plan", one)) for one in several)
