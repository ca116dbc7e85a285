"""What an optimizer keeps on the device, and what its update allocates: found by stepping it, one parameter at a time.

    AdamW over 25.3M parameters  ->  states 202.4 MB, workspace of the update 8.4 MB

A copy of the optimizer steps on a made-up parameter of each distinct shape, so that no rule about any optimizer is
written here.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from passes import Op, Storage, Trace

from .peak import measured, resident_bytes

STEPS = 7  # RAdam's update takes more from the sixth on


def with_update(trace: Trace, optimizer: torch.optim.Optimizer) -> Trace:
    """The trace with the optimizer's states among its inputs and its update as its last op."""
    nbytes, workspace = update_nbytes(optimizer)
    made = (Storage("optimizer_state", nbytes),)
    name = type(optimizer).__name__
    state = Op("optimizer_state", "state", makes=made, holds=("optimizer_state",), where=name)
    reads = ("optimizer_state", *dict.fromkeys(value for kind, value in trace.outputs if kind == "gradient"))
    update = Op("optimizer_step", f"{name}.step", reads, phase="update", workspace=workspace)
    return replace(trace, ops=(state, *trace.ops, update))


def update_nbytes(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of all states, and at most what one update allocates and frees.

    Raises:
        TypeError: its step can't be called without a closure, or not with dense gradients.
    """
    states, works, together = 0, list[int](), False
    for group in optimizer.param_groups:
        shapes = Counter(
            (p.shape, p.dtype, p.device) for p in group["params"] if p.requires_grad or p in optimizer.state
        )
        for (shape, dtype, device), count in shapes.items():
            state, work = _step(optimizer, group, torch.zeros(shape, dtype=dtype, device=device))
            states += state * count
            works += [work] * count if _foreach(group, device) else [work] * min(count, 2)
            together |= _foreach(group, device)
    # One after the other, an update's last temporaries are there while those of the next parameter are made.
    return states, sum(works) if together else sum(sorted(works)[-2:])


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """The tensors that the optimizer holds now."""
    return (leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor))


def _step(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> tuple[int, int]:
    """Bytes of state and of workspace of one parameter."""
    parameter.requires_grad_()
    parameter.grad = torch.zeros_like(parameter)
    alone = copy.copy(optimizer)
    alone.state = defaultdict(dict)
    alone.param_groups = [{**group, "params": [parameter]}]
    try:
        allocated = [measured(lambda: type(optimizer).step(alone), parameter.device)[1] for _ in range(STEPS)]
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"{type(optimizer).__name__} can't be planned, since its step can't be tried on a dense gradient: {error}"
        ) from error
    kept = resident_bytes(state_tensors(alone))
    first, *later = [seen.peak if seen else 0 for seen in allocated]
    return kept, max(first - kept, *later)


def _foreach(group: dict[str, Any], device: torch.device) -> bool:
    """Whether the update treats all parameters at once, as torch does on a GPU unless told otherwise."""
    asked = group.get("foreach")
    return bool(asked) if asked is not None else device.type != "cpu" and not group.get("fused")
