"""Check the arguments of `OSS`, and copy its parameter groups.

[w, b]  or  [("w", w), ("b", b)]  or  [{"params": [w], "lr": 0.1}, ...]   ->   a list of new dicts
gradients="averaged"     ->   ShardError: gradients='averaged'; give one of 'average', 'same'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim

from ...errors import ShardError
from ...optim.elementwise import ELEMENTWISE
from ...options.argument_rules import SHARDED_RULES, check_argument

Group = dict[str, Any]


def check_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        call = 'torch.distributed.init_process_group("gloo"), or "nccl" with GPUs'
        raise ShardError(f"there is no process group to shard over: start with torchrun, and first call {call}")
    try:
        is_outside = dist.get_rank(group) < 0
    except (TypeError, ValueError) as error:
        advice = "create one with torch.distributed.new_group(ranks), which all ranks have to call"
        raise ShardError(f"group={group!r} is no process group of this program; {advice}") from error
    if is_outside:
        raise ShardError(f"rank {dist.get_rank()} is not in the group; build the optimizer on the group's ranks alone")
    checked = dist.group.WORLD if group is None else group
    assert checked is not None
    return checked


def check_oss_arguments(**given: Any) -> dict[str, Any]:
    try:
        checked = {name: check_argument(name, value, SHARDED_RULES) for name, value in given.items()}
    except (TypeError, ValueError) as error:
        raise ShardError(str(error)) from None
    is_float16 = checked["wire_dtype"] is torch.float16
    if checked["gather"] == "forward" and (issubclass(checked["optim"], optim.LBFGS) or is_float16):
        why = "float16 may have to be sent a second time" if is_float16 else "LBFGS evaluates losses in its step"
        raise ShardError(f'gather="forward" leaves gathering to the next forward, and {why}; give gather="step"')
    return checked


def copy_groups(params: Iterable[Any]) -> list[Group]:
    given = list(check_argument("params", params, SHARDED_RULES))
    if not given:
        raise ValueError("optimizer got an empty parameter list")
    return list(map(copy_group, given)) if isinstance(given[0], dict) else [{"params": given}]


def copy_group(group: Group) -> Group:
    if not isinstance(group, dict):
        raise TypeError(f"param_group is a {type(group).__name__}; give a dict")
    params = group["params"]
    if isinstance(params, set):  # torch refuses sets, and says why
        return dict(group)
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def check_parameters(parameters: Sequence[Tensor]) -> None:
    if len(set(parameters)) != len(parameters):
        raise ShardError("a parameter is twice in one group; give each parameter once")
    if empty := [i for i, parameter in enumerate(parameters) if parameter.is_meta]:
        message = f"parameter {empty[0]} of the group is on the meta device, where it has no values"
        raise ShardError(f"{message}; give the module a device (to_empty) and values, then make the optimizer")


def options(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def template(kind: type[optim.Optimizer], groups: Sequence[Group], defaults: Group) -> optim.Optimizer:
    """Return an optimizer with the caller's options, which allocates no states; it refuses what the class refuses."""
    if kind in ELEMENTWISE:  # these do not read shapes, and may create states in their constructor
        groups = [{**group, "params": list(map(_empty, group["params"]))} for group in groups]
    return kind(list(map(copy_group, groups)), **defaults)


def _empty(parameter: Any) -> Any:
    if isinstance(parameter, tuple):
        return parameter[0], _empty(parameter[1])
    return parameter.detach().new_empty(0) if isinstance(parameter, Tensor) else parameter
