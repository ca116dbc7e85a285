"""The options of one call of `compile`, `plan` or `sweep`, checked and converted.

    budget="8GB", time_limit=None, wire_dtype=torch.bfloat16
    ->   CompileOptions("8GB", time_limit=None, wire_dtype="bf16")

Checks that need the model or the device are made where those are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import Any, TypedDict, Unpack

import torch

from ..report.saved_plan import PlanRecord, SavedPlan, saved_plan
from ..storage.pinned_pool import host_nbytes
from ..storage.spill_file import available_nbytes, require_writable, spill_folder
from ..storage.wire_cast import wire_name
from ..system.byte_sizes import disk_nbytes
from ..tensors.loss_outputs import OutputSelector, select_all, select_losses
from .argument_rules import check_argument

Budget = str | int | float | None


class PlanArguments(TypedDict, total=False):
    """The arguments that `compile`, `plan` and `sweep` hand to the planner, by name."""

    optimizer: torch.optim.Optimizer | None
    offload: str | None
    spill_dir: str | PathLike[str] | None
    plan: PlanRecord | Sequence[PlanRecord] | None
    time_limit: float | None
    wire_dtype: torch.dtype | None
    accumulate: bool | None
    forwards: int
    fuse_update: bool
    host_update: bool
    lower: str | None
    strict: bool
    host: Budget
    disk: Budget
    cuda_graphs: bool | str
    opaque: bool | Sequence[str]
    slices: str | Mapping[str, int] | None


class CompileArguments(PlanArguments, total=False):
    """The same, with those that change the module before it is planned."""

    loss: Callable[..., Any] | None
    microbatches: int
    reduction: str | None


# Seconds by default: a first call of 20,000 ops, which are rewritten and run as well, takes less than a minute.
FIRST_CALL_S = 40.0  # of capture and planning
LEAST_S = 10.0  # of planning, however long capture took


@dataclass(frozen=True)
class CompileOptions:
    """The options of a planner; see `memgraph.compile`.

    Attributes:
        plans: saved plans, used instead of a search.
        time_limit: seconds of planning; infinity without a limit, None for the default.
        wire_dtype: the name of the type that offloaded values may be rounded to; empty for no rounding.
        host: the most bytes of host memory; None for the default.
        disk: the most bytes on the disk; None for what is free.
        opaque: paths of submodules that run as they are; True for those that can't be traced, False for none.
        slices: "auto", the parts of submodules by path, or None.
    """

    budget: Budget
    _: KW_ONLY
    optimizer: torch.optim.Optimizer | None = None
    offload: str | None = "auto"
    spill_dir: str | PathLike[str] | None = None
    plans: tuple[SavedPlan, ...] = ()
    time_limit: float | None = None
    fuse_update: bool = False
    wire_dtype: str = ""
    lower: str | None = None
    strict: bool = False
    host_update: bool = False
    host: int | None = None
    disk: int | None = None
    accumulate: bool | None = None
    forwards: int = 1
    cuda_graphs: bool | str = False
    opaque: bool | tuple[str, ...] = True
    slices: str | Mapping[str, int] | None = None

    @property
    def search_key(self) -> tuple[object, ...]:
        """Everything that a search depends on besides the step and the machine."""
        planned = self.time_limit, self.forwards, self.offload, self.fuse_update, self.wire_dtype, self.lower
        return *planned, self.host_update, self.host, self.disk, self.cuda_graphs

    def planning_s(self, captured_s: float = math.inf) -> float:
        """Return the seconds of planning after a capture of so many; without a capture, the least."""
        return planning_s(self.time_limit, captured_s)

    @property
    def outputs(self) -> OutputSelector:
        """The outputs that backward starts from in the first plan.

        With several open forwards that is all: their loss combines outputs that are no scalars.
        """
        return select_losses if self.forwards == 1 else select_all


DEFAULTS: PlanArguments = {
    "optimizer": None,
    "spill_dir": None,
    "wire_dtype": None,
    "fuse_update": False,
    "host_update": False,
    "host": None,
    "disk": None,
    "accumulate": None,
    "forwards": 1,
    "cuda_graphs": False,
}  # of the arguments that others are checked against


def parse_options(budget: Budget, **given: Unpack[PlanArguments]) -> CompileOptions:
    """Return the options that these arguments ask for; raises as `memgraph.compile`."""
    saved = given.pop("plan", None)
    checked = {name: check_argument(name, value) for name, value in {"budget": budget, **DEFAULTS, **given}.items()}
    _refuse_mixed(checked, saved is not None)
    if checked["spill_dir"] is not None:
        require_writable(checked["spill_dir"])
    converted = {
        "wire_dtype": wire_name(checked["wire_dtype"]),
        "plans": _plans(saved),
        "host": host_nbytes(checked["host"]),
        "disk": _disk(checked["disk"], checked["spill_dir"]),
        "opaque": _opaque(checked.get("opaque", True)),
        "slices": _slices(checked.get("slices")),
    }
    return CompileOptions(**{**checked, **converted})


def _disk(given: Budget, spill_dir: str | PathLike[str] | None) -> int | None:
    return None if given is None else disk_nbytes(given, available_nbytes(spill_folder(spill_dir)))


def _refuse_mixed(checked: Mapping[str, Any], has_plans: bool) -> None:
    """Refuse arguments that exclude each other."""
    optimizer, fuses, on_host = checked["optimizer"], checked["fuse_update"], checked["host_update"]
    if checked["forwards"] > 1 and (fuses or checked["cuda_graphs"] is True or has_plans):
        raise ValueError(
            "forwards= keeps several forwards open at once, which fuse_update=True, cuda_graphs=True and saved plans "
            "do not support: leave out one of them"
        )
    if optimizer is None and fuses:
        raise ValueError("fuse_update=True needs the optimizer that it updates with; give optimizer=")
    if optimizer is None and on_host:
        raise ValueError("host_update=True needs the optimizer that it updates with; give optimizer=")
    if fuses and checked["accumulate"]:
        raise ValueError(
            "accumulate=True adds to gradients, and fuse_update=True leaves no gradients to add to: give one of them"
        )
    if fuses and on_host:
        raise ValueError(
            "host_update=True updates on the host after backward, and fuse_update=True updates in backward: give one "
            "of them"
        )


def _slices(given: str | Mapping[str, int] | None) -> str | dict[str, int] | None:
    """Return `slices=` with numbers of parts that are Python's."""
    return {path: int(parts) for path, parts in given.items()} if isinstance(given, Mapping) else given


def _opaque(given: Any) -> bool | tuple[str, ...]:
    return given if isinstance(given, bool) else tuple(given)


def _plans(given: object) -> tuple[SavedPlan, ...]:
    several = () if given is None else given if isinstance(given, list | tuple) else (given,)
    if given is not None and not several:
        raise ValueError("plan=[] has no plan, so each call would be refused: give plans, or None to search")
    return tuple(saved_plan(check_argument("plan", one)) for one in several)


def planning_s(time_limit: float | None, captured_s: float) -> float:
    """Return the seconds of planning after a capture of so many; None is the default limit."""
    return max(LEAST_S, FIRST_CALL_S - captured_s) if time_limit is None else time_limit
