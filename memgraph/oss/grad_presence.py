"""Before a step, agree on all ranks which parameters have gradients and whether a rank can't step.

    rank 0: w has a gradient, b has none       ->   w has one, b has one: on both ranks
    rank 1: w has none, b has one

An error of one rank is an error on all, so no rank waits for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import ShardError
from .comm.agreement import check_agreement, format_option
from .comm.rank_group import RankGroup, all_failures, format_failures
from .shards.layout import ShardLayout
from .shards.param_groups import Group, options
from .shards.shard_views import is_placeholder

NONE, SHARDED, DENSE, SPARSE = range(4)  # SHARDED: backward has averaged it, and each rank keeps its shard
ANY_INFINITE = "any gradients that are not finite"  # the one flag that may differ between ranks
ADVICE = "Set the same on all ranks, and give a scheduler that looks at a loss their mean; nothing has been updated."


def exchange_presence(
    ranks: RankGroup,
    layout: ShardLayout,
    groups: Sequence[Group],
    error: BaseException | None,
    flags: dict[str, bool],
    call: str = "",
) -> tuple[list[int], dict[str, bool]]:
    """Return for each parameter the largest kind of gradient on any rank, and the flags that any rank has.

    Args:
        error: why this rank can't step.
        call: what has to be equal on all ranks, besides options and which parameters are frozen.
    """
    parameters = layout.parameters
    own = [error is not None, *flags.values(), *(not flag for flag in flags.values()), *map(_kind, parameters)]
    chosen = _checksum(groups, parameters, call)
    own += [layout.checksum, -layout.checksum, chosen, -chosen]
    *largest, layout_max, layout_min, chosen_max, chosen_min = ranks.maximum(
        ranks.tensor(own, torch.int32, layout.device)
    ).tolist()
    if largest[0]:
        failures = all_failures(ranks.watchdog, error, "exchange of why a rank can't step")
        raise error or ShardError(f"another rank can't step, so none does: {format_failures(failures)}")
    if layout_max != -layout_min:
        raise ShardError("ranks have parameters of different shapes, types or strides; do the same to all of them")
    count = len(flags)
    on, off = largest[1 : 1 + count], largest[1 + count : 1 + 2 * count]
    for name, is_on, is_off in zip(flags, on, off, strict=True):
        if is_on and is_off and name != ANY_INFINITE:
            raise ShardError(f"some ranks have {name}, others have not; call the same on all ranks")
    if chosen_max != -chosen_min:
        check_agreement(ranks.watchdog, list(_lines(groups, parameters, call)), ADVICE)
    return largest[1 + 2 * count :], dict(zip(flags, map(bool, on), strict=True))


def _checksum(groups: Sequence[Group], parameters: Sequence[Tensor], call: str) -> int:
    frozen = bytes([parameter.requires_grad for parameter in parameters])
    return zlib.crc32("\n".join([call, *_option_lines(groups)]).encode(), zlib.crc32(frozen)) >> 1


def _option_lines(groups: Sequence[Group]) -> Iterator[str]:
    for place, group in enumerate(groups):
        for name, value in sorted(options(group).items()):
            yield f"{name} of group {place}: {format_option(value)}"


def _lines(groups: Sequence[Group], parameters: Sequence[Tensor], call: str) -> Iterator[str]:
    yield f"what is called: {call}"
    yield from _option_lines(groups)
    for place, parameter in enumerate(parameters):
        yield f"parameter {place}: {'trained' if parameter.requires_grad else 'frozen'}"


def _kind(parameter: Tensor) -> int:
    grad = parameter.grad
    if grad is None:
        return NONE
    if is_placeholder(grad):
        return SHARDED
    return DENSE if grad.layout == torch.strided else SPARSE
