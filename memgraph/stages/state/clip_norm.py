"""Clip the gradients of all stages by their common norm.

rank 0: norms of its gradients    rank 1: those of its own    ->    gradients of both, scaled by the norm of all

Norms are combined in the order of the model's parameters, as `torch.nn.utils.clip_grad_norm_` does: to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ...oss.clip_norm import NormLimit
from ..ranks.stage_group import StageGroup, of_all_ranks


def clip_stages(
    group: StageGroup, own: Mapping[str, nn.Parameter], order: Iterable[str], max_norm: float, norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:  # fmt: skip
    """Scale the gradients of this rank's parameters; return the norm over all ranks.

    Args:
        order: the names of the parameters of all ranks.

    Raises:
        AgreementError: ranks give other arguments.
        RuntimeError: the norm is not finite, and that is an error.
    """
    limit = NormLimit.of(max_norm, norm_type, error_if_nonfinite)
    group.check_agreement([str(limit)])
    known = _norms_of_all(group, own, limit.norm_type)
    norms = [known[name] for name in order if name in known]
    total = torch.linalg.vector_norm(torch.stack(norms), limit.norm_type) if norms else torch.tensor(0.0)
    if limit.error_if_nonfinite and not bool(total.isfinite()):
        text = (
            f"the total norm of order {limit.norm_type} of the gradients is {total.item()}, so it can't be clipped; "
            "with error_if_nonfinite=False it is returned instead"
        )
        raise of_all_ranks(RuntimeError(text))
    torch.nn.utils.clip_grads_with_norm_(own.values(), limit.max_norm, total)
    return total


def _norms_of_all(group: StageGroup, own: Mapping[str, nn.Parameter], norm_type: float) -> dict[str, Tensor]:
    """Return the norm of each gradient of all ranks."""
    gradients = {name: parameter.grad for name, parameter in own.items() if parameter.grad is not None}
    norms = {name: torch.linalg.vector_norm(gradient, norm_type) for name, gradient in gradients.items()}
    text = json.dumps({name: (norm.item(), str(norm.dtype).partition(".")[2]) for name, norm in norms.items()})
    texts = group.share(text.encode(), "exchange of norms")
    every = {name: pair for each in texts for name, pair in json.loads(each).items()}
    return {name: torch.tensor(value, dtype=getattr(torch, dtype)) for name, (value, dtype) in every.items()}
