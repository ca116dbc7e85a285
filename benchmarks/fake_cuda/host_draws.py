"""Draw the numbers of a generator of a described device by the host's.

a draw of the device's generator with seed 7, at offset 12   ->   the host's numbers of seed 7000033; then offset 16
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

STEP = 4  # by which each draw advances the offset


def next_seed(generator: torch.Generator | None = None) -> int:
    """Return the host's seed for the next draw of a generator of the device, and advance that.

    While a graph is captured nothing is drawn: the graph draws when it is launched.
    """
    if torch.cuda.is_current_stream_capturing():
        return 0
    generator = torch.cuda.default_generators[0] if generator is None else generator
    offset = generator.get_offset()
    generator.set_offset(offset + STEP)
    return (generator.initial_seed() * 1_000_003 + offset) % (1 << 62)


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Let the host's default generator have the numbers of a seed."""
    kept = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(kept)
