"""A GradScaler is of the ranks of a pipeline, or it is refused.

GradScaler("cpu")                 rank 1 skips a step with an infinity, rank 0 does not    ->    ValueError
GradScaler("cpu", group=group)    all skip it
"""

from __future__ import annotations

import torch

from ...oss.grad_scaler import GradScaler
from .stage_group import StageGroup


def check_scaler(group: StageGroup, scaler: torch.amp.GradScaler) -> None:
    """
    Raises:
        ValueError: an infinity in one stage would not count in the others.
    """
    if group.watchdog is None or not scaler.is_enabled():
        return
    ranks = scaler.ranks if isinstance(scaler, GradScaler) else None
    if ranks is None or not {*group.watchdog.members} <= {*ranks.watchdog.members}:
        raise ValueError(
            f"an infinity in one stage has to count on ranks {[*group.watchdog.members]}, and this scaler has "
            f"{'no group' if ranks is None else f'a group of ranks {[*ranks.watchdog.members]}'}; give "
            "memgraph.GradScaler group= the group of the pipeline, or torch.distributed.group.WORLD"
        )
