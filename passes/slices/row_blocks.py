"""Divide the rows of large weights into blocks that come and go one by one.

weights of 82, 50 and 17 MB, level 1    ->   those of more than a fourth of the largest, in blocks of at most an eighth
rows_of_blocks(10000, 4096)             ->   (0, 4096), (4096, 8192), (8192, 10000)

The budget plays no part, so what one budget needs in blocks, another has in the same blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

Rows = tuple[int, int]  # from the first, up to but without the second

LEVELS = 2  # each cuts smaller weights, in smaller blocks
FINER = 4
# Matrix kernels cut long sums into pieces of a few hundred terms. A block that ends where a piece does has the sum's
# bits; which of these do is tried on the device.
UNITS = (1536, 768, 384, 192)


def block_nbytes(weights: Mapping[str, int], level: int, whole: int = 0) -> dict[str, int]:
    """Return the most bytes of a block for each weight that is cut; `weights` are the bytes of each that can be.

    Level 0 cuts none. What is smaller than `whole`, the largest parameter that can't be cut, stays whole too: that one
    has to be there in any case.
    """
    largest = max(weights.values(), default=0)
    return {
        name: 2 * largest // FINER ** (level + 1)
        for name, nbytes in weights.items()
        if level and nbytes * FINER**level > largest and nbytes > whole
    }


def block_sizes(rows: int, row_nbytes: int, most_nbytes: int, page: int) -> list[int]:
    """Return numbers of rows that a block may have, the largest first: of each unit, one and as many as there is room
    for, or one of the smallest. Each block but the last fills whole pages."""
    of_pages = page // math.gcd(page, row_nbytes)
    units = [unit for unit in (math.lcm(unit, of_pages) for unit in UNITS) if unit < rows]
    most = min(max(most_nbytes // row_nbytes, min(units, default=0)), rows - 1)
    return sorted({size for unit in units if unit <= most for size in (unit, most // unit * unit)}, reverse=True)


def rows_of_blocks(rows: int, size: int) -> tuple[Rows, ...]:
    """Return the blocks of a weight, `size` rows each; the last one has the rest."""
    return tuple((first, min(first + size, rows)) for first in range(0, rows, size))
