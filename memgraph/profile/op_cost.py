"""The cost of an op, its key, and its record in the cache of measurements.

mm f32[512, 512] f32[512, 512]   ->   OpCost(Cost(us=310.0, workspace=0), layouts of its results)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map

from ..graph.aten_shims import COPY_STORAGES
from ..graph.result_layout import ResultLayout
from ..graph.summarize import Cost
from ..guards.signature import kernel_modes
from ..system.setting import environment_key
from .divided_arguments import FILLERS


@dataclass(frozen=True)
class OpCost:
    """The cost of an op, and the layouts of its results; None if it could not be run."""

    cost: Cost
    layouts: tuple[ResultLayout, ...] | None
    is_timed: bool = True  # by more than one run, or by a long one
    disturbed: float = 0.0  # the share of it that was waited for a core, if that is much

    def beside(self, before: OpCost | None) -> OpCost:
        """Return this measurement with the time of an earlier one, if that was less disturbed."""
        if before is None or not 0.0 < before.disturbed < self.disturbed:
            return self
        return replace(self, cost=replace(self.cost, us=before.cost.us), disturbed=before.disturbed)


def kernel_modes_text() -> str:
    """Return all settings of the process that select kernels or allocators."""
    return f"{kernel_modes()}{torch.get_default_dtype()}"


def op_key(node: fx.Node, modes: str = "") -> str:
    """Return a key that is equal for nodes with the same kernels and sizes; `modes` are read if not given."""
    describe_tensor = _describe_storage if node.target in COPY_STORAGES else _describe_tensor

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        value = leaf.meta.get("val", "a generator")
        return describe_tensor(value) if isinstance(value, Tensor) else tree_map(describe_tensor, value)

    args, kwargs = map_aggregate((node.args, dict(node.kwargs)), describe)
    divided = "divided " if str(node.target) in FILLERS else ""  # earlier prices were of ops without work
    return f"{divided}{node.target}{args!r}{kwargs!r}{modes or kernel_modes_text()}"


def cache_key(key: str, device: torch.device) -> str:
    """Return the key of an op on disk."""
    return f"ran {key} {environment_key(device)}"


def _describe_tensor(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    form = (str(value.dtype), tuple(value.shape), value.stride(), str(value.device))
    return (*form, value.is_conj(), value.is_neg()) if value.is_conj() or value.is_neg() else form


def _describe_storage(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return (_describe_tensor(value), value.storage_offset(), value.untyped_storage().nbytes())


def written(op_cost: OpCost) -> dict[str, Any]:
    layouts = [(str(r.layout[0]).removeprefix("torch."), *r.layout[1:], *r[1:]) for r in op_cost.layouts or ()]
    once = {} if op_cost.is_timed else {"once": True}
    disturbed = {"disturbed": op_cost.disturbed} if op_cost.disturbed else {}
    return {"us": op_cost.cost.us, "workspace": op_cost.cost.workspace, "made": layouts, **once, **disturbed}


def read(written: Any) -> OpCost:
    """Return a cost from the cache; one that was disturbed counts as not timed.

    Raises:
        TypeError, ValueError, LookupError, AttributeError: it is none.
    """
    cost, disturbed = Cost(float(written["us"]), int(written["workspace"])), float(written.get("disturbed", 0.0))
    layouts = tuple(_layout(*made) for made in written["made"])
    return OpCost(cost, layouts, is_timed="once" not in written and not disturbed, disturbed=disturbed)


def _layout(dtype: str, shape: list[int], strides: list[int], offset: int, nbytes: int) -> ResultLayout:
    made = getattr(torch, dtype)
    if not isinstance(made, torch.dtype) or len(shape) != len(strides):
        raise ValueError(f"no layout has {dtype} with {len(shape)} sizes and {len(strides)} strides")
    return ResultLayout((made, tuple(map(int, shape)), tuple(map(int, strides))), int(offset), int(nbytes))
