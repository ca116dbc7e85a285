"""Cut a captured step so that its large weights are read in blocks of rows.

level 0         ->   all weights are whole
level 1, 2      ->   larger weights in blocks, and more of them
a saved plan    ->   the blocks that it has
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes.ir.machine import SMALLEST_STREAMED
from passes.slices.row_blocks import block_nbytes, block_sizes, rows_of_blocks
from passes.slices.whole_weight import Reason, WholeWeight

from ..graph.captured import Captured
from ..report.tables import mb
from ..storage.spill_file import PAGE
from .equal_bits import has_equal_bits, trial_nbytes
from .row_blocks import in_row_blocks
from .weights import Weight, weights_by_name, whole_weights

LOG = logging.getLogger(__name__)


class BlockTrials:
    """Tries whether weights have the same bits in blocks; the first trial that exceeds the budget is logged.

    Args:
        room: bytes that the budget leaves for a trial; None for no budget.
    """

    def __init__(self, room: int | None = None) -> None:
        self.room, self._is_logged = room, False

    def __call__(self, weight: Weight, size: int) -> bool:
        if self.room is not None and not self._is_logged and (nbytes := trial_nbytes(weight, size)) > max(self.room, 0):
            self._is_logged = True
            LOG.warning(
                "planning goes beyond the budget: a weight of %s, which is tried in blocks of rows, takes %s, and the "
                "budget leaves %s for it; to stay within it, call memgraph.plan with the same model, budget and "
                "MEMGRAPH_CACHE in a process that may use more memory, and what it finds is read from that cache",
                list(weight.value.shape), mb(nbytes), mb(max(self.room, 0)),
            )  # fmt: skip
        return has_equal_bits(weight, size)


@dataclass(frozen=True)
class BlockRequest:
    """The blocks that are asked for.

    Attributes:
        level: how many weights are cut, and how finely, as in `passes/slices/row_blocks.py`.
        rounds: weights are cut as well where sums round differently in blocks.
        tries: False for a device that is not here: its kernels can't be tried, and the largest blocks are taken.
        saved: rows of a block by parameter, in each saved plan.
        has_equal_bits: tries a weight in blocks.
    """

    level: int = 0
    rounds: bool = False
    tries: bool = True
    saved: tuple[Mapping[str, int], ...] = ()
    held: frozenset[str] = frozenset()
    has_equal_bits: BlockTrials = field(default_factory=BlockTrials)

    @property
    def is_made(self) -> bool:
        """Return True if any are asked for."""
        return self.level > 0 or any(self.saved)


def in_blocks(captured: Captured, request: BlockRequest) -> Captured:
    """Return the step with weights in blocks, and with the reasons of those that stay whole."""
    if not request.is_made:
        return captured
    weights = weights_by_name(captured, request.held)
    if request.saved:
        sizes, whole = _saved(weights, request.saved), tuple[WholeWeight, ...]()
    else:
        sizes, whole = _chosen(weights, whole_weights(captured, held=request.held), request)
    if sizes:
        blocks = {name: rows_of_blocks(weights[name].rows, size) for name, size in sizes.items()}
        trial = request.has_equal_bits
        rounded = {name for name, size in sizes.items() if request.tries and not trial(weights[name], size)}
        captured = replace(in_row_blocks(captured, blocks, weights), rounded_blocks=frozenset(rounded))
    return replace(captured, whole_weights=whole, whole=captured.unsliced)


def refused_weights(captured: Captured, refused: Reason) -> tuple[WholeWeight, ...]:
    """Return the weights for which blocks would be looked for, if they were not `refused` for the whole step."""
    whole = whole_weights(captured, refused)
    return tuple(whole[name] for name in _looked_for({}, whole, 1))


def _saved(weights: Mapping[str, Weight], plans: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the blocks of the first plan whose weights this step has; a call of another step is left whole."""
    known = (sizes for sizes in plans if sizes and all(_can_cut(weights.get(name), sizes[name]) for name in sizes))
    return next(known, {})


def _can_cut(weight: Weight | None, size: int) -> bool:
    return weight is not None and 0 < size < weight.rows and size * weight.row_nbytes % PAGE == 0


def _chosen(
    weights: Mapping[str, Weight], whole: Mapping[str, WholeWeight], request: BlockRequest
) -> tuple[dict[str, int], tuple[WholeWeight, ...]]:
    """Return the rows of a block for each weight that is cut, and the large weights that stay whole.

    A block has the most rows whose bits are those of the whole.
    """
    large = {name: each.value.nbytes for name, each in weights.items() if each.value.nbytes > SMALLEST_STREAMED}
    largest = max(whole.values(), key=lambda each: each.nbytes, default=None)
    most = block_nbytes(large, request.level, 0 if largest is None else largest.nbytes)
    chosen, left = dict[str, int](), list[WholeWeight]()
    for name in _looked_for(large, whole, request.level):
        if name in whole:
            left.append(whole[name])
        elif name not in most and largest is not None:
            left.append(WholeWeight(name, large[name], Reason.SMALLER, largest.weight))
        else:
            sizes = block_sizes(weights[name].rows, weights[name].row_nbytes, most[name], PAGE)
            if size := _size(weights[name], sizes, request):
                chosen[name] = size
            else:
                left.append(WholeWeight(name, large[name], Reason.BITS if sizes else Reason.ROWS))
    return chosen, tuple(left)


def _looked_for(large: Mapping[str, int], whole: Mapping[str, WholeWeight], level: int) -> list[str]:
    """Return the names of all weights, with those that stay whole, that are large enough for blocks."""
    sizes = {**large, **{name: each.nbytes for name, each in whole.items() if each.nbytes > SMALLEST_STREAMED}}
    return list(block_nbytes(sizes, level))


def _size(weight: Weight, sizes: Sequence[int], request: BlockRequest) -> int:
    """Return the rows of a block; 0 if none has the bits of the whole, and no sum may round."""
    equal = (size for size in sizes if not request.tries or request.has_equal_bits(weight, size))
    return next(equal, sizes[0] if sizes and request.rounds else 0)
