"""What all ranks have to know of each other before a step: whose gradients there are, and whether somebody can't step.

    rank 0: w has a gradient, b has none       ->   w has one, b has one: on both ranks
    rank 1: w has none, b has one

A rank that fails tells the others, so that none of them waits for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import ShardError
from .comm.agreement import check_agreement, written
from .comm.exchange import BucketComm
from .comm.failures import failures, in_words
from .shards.param_groups import Group, options
from .shards.placeholder_grads import is_placeholder
from .shards.shard_views import ShardViews

NONE, PARTS, DENSE, SPARSE = range(4)  # PARTS: backward has averaged it already, and each rank has its part
ANY_INFINITE = "any gradients that are not finite"  # the one flag that ranks need not agree on
ADVICE = "Set the same on all ranks, and give a scheduler that looks at a loss their mean; nothing has been updated."


def exchange_presence(
    exchange: BucketComm,
    pieces: ShardViews,
    groups: Sequence[Group],
    trouble: BaseException | None,
    flags: dict[str, bool],
    asked: str = "",
) -> tuple[list[int], dict[str, bool]]:
    """What any rank has: of each parameter the most of a gradient, and which flags; a collective.

    Args:
        trouble: why this rank can't step.
        asked: what has to be the same on all ranks, besides options and what is frozen.

    Raises:
        ShardError: another rank is in trouble, or ranks disagree on a flag or an option; nothing has been sent.
    """
    parameters = pieces.parameters
    mine = [trouble is not None, *flags.values(), *(not flag for flag in flags.values()), *map(_kind, parameters)]
    chosen = _checksum(groups, parameters, asked)
    mine += [pieces.checksum, -pieces.checksum, chosen, -chosen]
    *found, most, least, most_chosen, least_chosen = exchange.most(
        exchange.numbers(mine, torch.int32, pieces.device)
    ).tolist()
    if found[0]:
        told = failures(exchange.watchdog, trouble, "exchange of why a rank can't step")
        raise trouble or ShardError(f"another rank can't step, so none does: {in_words(told)}")
    if most != -least:
        raise ShardError("ranks have parameters of different shapes, types or strides; do the same to all of them")
    yes, no = found[1 : 1 + len(flags)], found[1 + len(flags) : 1 + 2 * len(flags)]
    for name, is_there, is_missing in zip(flags, yes, no, strict=True):
        if is_there and is_missing and name != ANY_INFINITE:
            raise ShardError(f"some ranks have {name}, others have not; call the same on all ranks")
    if most_chosen != -least_chosen:
        check_agreement(exchange.watchdog, list(_lines(groups, parameters, asked)), ADVICE)
    return found[1 + 2 * len(flags) :], dict(zip(flags, map(bool, yes), strict=True))


def _checksum(groups: Sequence[Group], parameters: Sequence[Tensor], asked: str) -> int:
    """A number that int32 takes, of the options of all groups, of what is frozen, and of what is asked."""
    frozen = bytes([parameter.requires_grad for parameter in parameters])
    return zlib.crc32("\n".join([asked, *_options(groups)]).encode(), zlib.crc32(frozen)) >> 1


def _options(groups: Sequence[Group]) -> Iterator[str]:
    for place, group in enumerate(groups):
        for name, value in sorted(options(group).items()):
            yield f"{name} of group {place}: {written(value)}"


def _lines(groups: Sequence[Group], parameters: Sequence[Tensor], asked: str) -> Iterator[str]:
    """What the checksum is of, in words."""
    yield f"what is asked for: {asked}"
    yield from _options(groups)
    for place, parameter in enumerate(parameters):
        yield f"parameter {place}: {'trained' if parameter.requires_grad else 'frozen'}"


def _kind(parameter: Tensor) -> int:
    gradient = parameter.grad
    if gradient is None:
        return NONE
    if is_placeholder(gradient):
        return PARTS
    return DENSE if gradient.layout == torch.strided else SPARSE
