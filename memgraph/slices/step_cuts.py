"""The attempts at a plan, in their order: how much of the step runs in parts in each.

recurrent layers as one op each   ->   as the ops of their steps, from here on
whole weights; slices as far as "auto" goes, further, none   ->   weights in blocks of rows, in smaller ones
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.slices.row_blocks import LEVELS

from .step_slices import EXTENTS, Extent


@dataclass(frozen=True)
class Cuts:
    """The parts that an attempt has.

    Attributes:
        extent: how far slices="auto" goes.
        level: how many weights come in blocks of rows, and how small these are.
        unrolls: recurrent layers are the ops of their steps.
        tries: blocks are tried on the device; False for one that is not here.
    """

    extent: Extent = "once"
    level: int = 0
    unrolls: bool = True
    tries: bool = True


WHOLE = Cuts(unrolls=False)
UNROLLED = Cuts()
# Until a plan fits.
ATTEMPTS = (WHOLE, *map(Cuts, EXTENTS), *(Cuts("once", level) for level in range(1, LEVELS + 1)))
