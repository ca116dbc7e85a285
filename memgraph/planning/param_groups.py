"""An optimizer's groups, as planning sees them: who is in them, and what of a step they train.

groups_of(AdamW([w, b]))   ->   ((id of w, id of b), ())
"""

from __future__ import annotations

from torch import Tensor, nn, optim

from ..graph.captured import Captured
from ..optim.state_parts import TrainedParameters, state_parts
from ..oss import OSS
from ..oss.offloaded_states import shard_parts


def trained_by(
    captured: Captured, module: nn.Module, optimizer: optim.Optimizer | None, fuses: bool = False
) -> TrainedParameters:
    """What a captured step of a module trains for an optimizer, which `fuses` its updates into backward or does not."""
    names = {role.name for role in captured.outputs if role.kind == "gradient"}
    parameters = [parameter for name, parameter in module.named_parameters() if name in names]
    if isinstance(optimizer, OSS):
        optimizer.follow()
        return TrainedParameters(parameters, shard_parts(optimizer), captured=captured)
    parts = state_parts(optimizer, fuses) if optimizer is not None else []
    return TrainedParameters(parameters, parts, captured=captured)


def group_key(optimizer: optim.Optimizer | None) -> tuple[tuple[int, ...], ...]:
    """Who is in each of an optimizer's groups: with another one it takes more, and other states live far. And what
    forward gathers of what is frozen, and which of that has states."""
    if optimizer is None:
        return ()
    found = tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)
    if isinstance(optimizer, OSS):
        return *found, optimizer.awaited.frozen, optimizer.updates.rested
    return *found, tuple(id(p) for p in optimizer.state if isinstance(p, Tensor) and not p.requires_grad)
