"""What all ranks have to know of each other before a step: whose gradients there are, and whether somebody can't step.

    rank 0: w has a gradient, b has none       ->   w has one, b has one: on both ranks
    rank 1: w has none, b has one

A rank that fails tells the others, so that none of them waits for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import ShardError
from .agreement import written
from .exchange import Exchange
from .ghosts import is_ghost
from .groups import Group, options
from .pieces import Pieces

NONE, PARTS, DENSE, SPARSE = range(4)  # PARTS: backward has averaged it already, and each rank has its part
ANY_INFINITE = "any gradients that are not finite"  # the one flag that ranks need not agree on


def shared(
    exchange: Exchange, pieces: Pieces, groups: Iterable[Group], trouble: BaseException | None, flags: dict[str, bool]
) -> tuple[list[int], dict[str, bool]]:
    """Of each parameter the most of a gradient that any rank has, and which flags any rank has.

    Raises:
        ShardError: another rank is in trouble, or ranks disagree on a flag or an option; nothing has been sent.
    """
    parameters = pieces.parameters
    mine = [trouble is not None, *flags.values(), *(not flag for flag in flags.values()), *map(_kind, parameters)]
    chosen = _checksum(groups)
    mine += [pieces.checksum, -pieces.checksum, chosen, -chosen]
    *found, most, least, most_chosen, least_chosen = exchange.most(
        exchange.numbers(mine, torch.int32, parameters[0].device)
    ).tolist()
    if trouble is not None:
        raise trouble
    if found[0]:
        raise ShardError("another rank can't step, and says why; nothing has changed here")
    if most != -least:
        raise ShardError("ranks have parameters of different shapes, types or strides; do the same to all of them")
    if most_chosen != -least_chosen:
        advice = "set the same, and give a scheduler that looks at a loss the mean over ranks"
        raise ShardError(f"the options of groups, such as lr, differ between ranks; {advice}")
    yes, no = found[1 : 1 + len(flags)], found[1 + len(flags) : 1 + 2 * len(flags)]
    for name, is_there, is_missing in zip(flags, yes, no, strict=True):
        if is_there and is_missing and name != ANY_INFINITE:
            raise ShardError(f"some ranks have {name}, others have not; call the same on all ranks")
    return found[1 + 2 * len(flags) :], dict(zip(flags, map(bool, yes), strict=True))


def _checksum(groups: Iterable[Group]) -> int:
    """Of the options of all groups, as a number that int32 takes."""
    lines = (f"{name}={written(value)}" for group in groups for name, value in sorted(options(group).items()))
    return zlib.crc32("\n".join(lines).encode()) >> 1


def _kind(parameter: Tensor) -> int:
    gradient = parameter.grad
    if gradient is None:
        return NONE
    if is_ghost(gradient):
        return PARTS
    return DENSE if gradient.layout == torch.strided else SPARSE
