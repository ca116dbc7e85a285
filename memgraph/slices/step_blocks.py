"""Cut a captured step so that its large weights are read in blocks of rows.

level 0         ->   all weights are whole
level 1, 2      ->   larger weights in blocks, and more of them
a saved plan    ->   the blocks that it has
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from passes.ir.machine import SMALLEST_STREAMED
from passes.slices.row_blocks import block_nbytes, block_sizes, rows_of_blocks

from ..graph.captured import Captured
from ..storage.spill_file import PAGE
from .equal_bits import has_equal_bits
from .row_blocks import in_row_blocks
from .weights import Weight, weights_by_name


@dataclass(frozen=True)
class BlockRequest:
    """The blocks that are asked for.

    Attributes:
        level: how many weights are cut, and how finely, as in `passes/slices/row_blocks.py`.
        rounds: weights are cut as well where sums round differently in blocks.
        saved: rows of a block by parameter, in each saved plan.
    """

    level: int = 0
    rounds: bool = False
    saved: tuple[Mapping[str, int], ...] = ()

    @property
    def is_made(self) -> bool:
        """Return True if any are asked for."""
        return self.level > 0 or any(self.saved)


def in_blocks(captured: Captured, request: BlockRequest) -> Captured:
    """Return the step with weights in blocks; the step itself if none can be cut."""
    if not request.is_made:
        return captured
    weights = weights_by_name(captured)
    sizes = (
        _saved(weights, request.saved)
        if request.saved
        else _chosen(weights, request, _largest_whole(captured, weights))
    )
    if not sizes:
        return captured
    blocks = {name: rows_of_blocks(weights[name].rows, size) for name, size in sizes.items()}
    rounded = frozenset(name for name, size in sizes.items() if not has_equal_bits(weights[name], size))
    return replace(in_row_blocks(captured, blocks, weights), rounded_blocks=rounded)


def _saved(weights: Mapping[str, Weight], plans: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the blocks of the first plan whose weights this step has; a call of another step is left whole."""
    known = (sizes for sizes in plans if sizes and all(_can_cut(weights.get(name), sizes[name]) for name in sizes))
    return next(known, {})


def _can_cut(weight: Weight | None, size: int) -> bool:
    return weight is not None and 0 < size < weight.rows and size * weight.row_nbytes % PAGE == 0


def _largest_whole(captured: Captured, weights: Mapping[str, Weight]) -> int:
    """Return the bytes of the largest parameter that can't be cut."""
    cut = {weight.node for weight in weights.values()}
    inputs = captured.graph.graph.find_nodes(op="placeholder")
    return max(
        (node.meta["val"].nbytes for node in inputs if node.meta["kind"] == "parameter" and node not in cut), default=0
    )


def _chosen(weights: Mapping[str, Weight], request: BlockRequest, whole: int) -> dict[str, int]:
    """Return the rows of a block for each weight that is cut: the most whose bits are those of the whole."""
    large = {name: each.value.nbytes for name, each in weights.items() if each.value.nbytes > SMALLEST_STREAMED}
    chosen = {}
    for name, most in block_nbytes(large, request.level, whole).items():
        weight = weights[name]
        sizes = block_sizes(weight.rows, weight.row_nbytes, most, PAGE)
        equal = (size for size in sizes if has_equal_bits(weight, size))
        if size := next(equal, sizes[0] if sizes and request.rounds else 0):
            chosen[name] = size
    return chosen
