"""The order in which a stage runs forward and backward of its micro-batches.

1f1b, stage 0 of 2, 3 micro-batches    ->    F0 F1 B0 F2 B1 B2
gpipe                                  ->    F0 F1 F2 B0 B1 B2
without gradients                      ->    F0 B0 F1 B1 F2 B2, where backward is but the end of a forward
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SCHEDULES = ("1f1b", "gpipe")
NO_GRADIENTS = "forward only"


@dataclass(frozen=True)
class StageOrder:
    """The schedule of one stage of `stages`, for `chunks` micro-batches."""

    schedule: str
    stage: int
    stages: int
    chunks: int

    @property
    def open_forwards(self) -> int:
        """Return the number of forwards that are open at once."""
        if self.schedule == NO_GRADIENTS:
            return 1
        return min(self.chunks, self.stages - self.stage) if self.schedule == "1f1b" else self.chunks

    def actions(self) -> Iterator[tuple[str, int]]:
        """Yield ("forward" or "backward", micro-batch) in the order in which they run."""
        first = self.open_forwards
        yield from (("forward", i) for i in range(first))
        for i in range(self.chunks):
            yield "backward", i
            if first + i < self.chunks:
                yield "forward", first + i

    def unread_gradients(self, earliest: int) -> int:
        """Return the micro-batches whose gradients may wait for the stage `earliest`, which runs backward later.

        That stage begins backward of micro-batch i - n before this one begins that of i, in any case, so to wait for it
        can't block.
        """
        if self.schedule == "gpipe":
            return 1
        first = StageOrder(self.schedule, earliest, self.stages, self.chunks)
        return first.open_forwards - self.open_forwards + 1
