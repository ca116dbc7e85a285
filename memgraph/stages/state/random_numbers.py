"""Random numbers of a mini-batch in stages: those that the micro-batches would draw in turn, on one rank.

rank 0's generator: s                       rank 0, stage 0:  s + 0, s + 30, s + 60
stage 0 draws 10, stage 1 20      ->        rank 1, stage 1:  s + 10, s + 40, s + 70
3 micro-batches                             both, at the end: s + 90

If it is not known how many an op draws, each forward of a stage has a seed of its own, made from rank 0's generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..ranks.stage_group import StageGroup
from .draw_counts import skip

NBYTES = 4 * 8192  # of generators, their states, and numbers that are skipped
SEEDS = 1 << 62


@dataclass(eq=False)
class RandomNumbers:
    """Sets the generator of this process before each forward, and at the end of a mini-batch.

    Attributes:
        counts: how many numbers each stage draws, for each micro-batch; None where that is not known.
        first: the state of rank 0's generator.
    """

    counts: Sequence[Sequence[int] | None]
    stages: int
    first: torch.Tensor
    _places: dict[int, _Place] = field(default_factory=dict)  # of the next forward of each stage

    @classmethod
    def shared(cls, group: StageGroup, counts: Sequence[Sequence[int] | None], stages: int) -> RandomNumbers:
        """Begin a mini-batch where rank 0's generator is."""
        texts = group.share(torch.get_rng_state().numpy().tobytes(), "exchange of the generator's state")
        return cls(counts, stages, torch.frombuffer(bytearray(texts[0]), dtype=torch.uint8))

    def begin(self, stage: int, chunk: int) -> None:
        """Set the generator for the forward of a micro-batch; those of a stage come in their order."""
        if self._are_known:
            torch.set_rng_state(self._moved(stage, chunk, stage).generator.get_state())
        else:
            torch.manual_seed((self._seed + chunk * self.stages + stage) % SEEDS)

    def end(self) -> None:
        """Set the generator to where all micro-batches in turn would leave it."""
        if self._are_known:
            place = self._moved(next(iter(self._places), 0), len(self.counts), 0)
            torch.set_rng_state(place.generator.get_state())
        else:
            generator = torch.Generator()
            generator.set_state(self.first)
            skip(generator, 2)
            torch.set_rng_state(generator.get_state())

    @property
    def _are_known(self) -> bool:
        return all(each is not None for each in self.counts)

    @property
    def _seed(self) -> int:
        generator = torch.Generator()
        generator.set_state(self.first)
        return int(torch.randint(SEEDS, (), generator=generator))

    def _moved(self, stage: int, chunk: int, at: int) -> _Place:
        """Return the place of a stage, moved to that of the stage `at` in a micro-batch."""
        place = self._places.setdefault(stage, _Place(torch.Generator()))
        if place.at is None:
            place.generator.set_state(self.first)
        target = sum(sum(each or ()) for each in self.counts[:chunk])
        target += sum((self.counts[chunk] or ())[:at]) if chunk < len(self.counts) else 0
        skip(place.generator, target - (place.at or 0))
        place.at = target
        return place


@dataclass(eq=False)
class _Place:
    """A generator, after so many numbers."""

    generator: torch.Generator
    at: int | None = None
