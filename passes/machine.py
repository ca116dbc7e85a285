"""What a step may use: the budget of the device, and the links to the tier beyond it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A device and the far tier behind it.

    Bytes are ints; `out` and `back` are bytes per microsecond (1.0 = 1 MB/s ... 1000.0 = 1 GB/s), measured; 0.0 means
    that there is no far tier.  `staging` bytes of the device are held for copies as soon as a plan makes one.
    """

    budget: int
    device: str = "cpu"
    tier: str = "disk"
    out: float = 0.0
    back: float = 0.0
    staging: int = 0
    capacity: int = 1 << 62  # bytes that the far tier takes

    def __str__(self) -> str:
        far = f"{self.tier} {self.out:.0f}/{self.back:.0f} MB/s" if self.out and self.back else "no far tier"
        return f"{self.device} {self.budget} bytes, {far}"
