"""What was found of one architecture under one budget, and its verdict.

Row("gpt2", "transformers", share=0.4, state="whole", counted=..., forecast=..., budget=...).verdict   ->   "ok"
"""

from __future__ import annotations

from dataclasses import dataclass

CAPTURED = ("whole", "guards", "opaque")  # as one graph, with guards on values, with parts that run as they are


@dataclass(frozen=True)
class Row:
    """One architecture under one budget; bytes are of the whole device, seconds of the first call."""

    name: str
    library: str
    share: float  # of eager's peak above parameters, buffers and batch
    state: str = "failed"  # of CAPTURED, or "refused" by a CaptureError, or "failed" with another error
    reason: str = ""
    ops: int = 0
    guards: int = 0
    opaque: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    different: tuple[str, ...] = ()  # facts that are not eager's
    eager: int = 0
    counted: int = 0  # by the second meter in the step that came nearest to its forecast, with buffers of copies
    planning: int = 0  # by the second meter, the most while calls were captured, priced and planned
    forecast: int = 0
    budget: int = 0
    needs: int = 0  # the budget that an error has named, and that was given then
    kinds: int = 0  # steps that were planned

    @property
    def is_captured(self) -> bool:
        return self.state in CAPTURED

    @property
    def verdict(self) -> str:
        """The worst that is true of it: "refused", "failed", "wrong", "over", "needs" another budget, or "ok"."""
        if not self.is_captured:
            return self.state
        if self.different:
            return "wrong"
        if not self.counted <= self.forecast <= self.budget:
            return "over"
        return "needs" if self.needs else "ok"
