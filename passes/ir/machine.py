"""What a step may use: the budget of the device, and the links to the tier beyond it."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST_HOME = 1 << 16  # bytes of an input or a gradient: what is smaller stays on the device


@dataclass(frozen=True)
class Machine:
    """A device and the far tier behind it.

    Bytes are ints; `out` and `back` are bytes per microsecond (1.0 = 1 MB/s ... 1000.0 = 1 GB/s), measured; 0.0 means
    that there is no far tier.  `staging` bytes of the device are held for copies as soon as a plan makes one.

    Who copies may need what computes: a copy takes `call` microseconds of compute to be begun and seen to its end, and
    `drag` more for each of its bytes, where the threads that copy share their cores with those that compute.

    With `turns` the tier carries one way at a time, what was asked for first before the rest, as a disk does; else each
    direction is a link of its own.  `window` bytes are taken by an update that fetches from the tier; `ahead` of them,
    where updates run in backward, from the first such one on: what goes through them comes and leaves while others run.

    `stepping` is how fast the host updates states where they lie, in their bytes per microsecond, with what belongs to
    them; 0.0: it updates none.

    `wire` is the type to which values may be cast for their way there and back ("bf16"); empty: none, nothing is lossy.
    `narrow` and `widen` are bytes of the value as it was, per microsecond of compute, that the two casts take.

    `net` is the network between the ranks of a group: bytes per microsecond that one exchange among them takes, and
    `latency` the microseconds that it takes besides; 0.0 means that nothing is exchanged.  `strain` is what compute
    loses to one that is under way, as a share of its time: on a CPU, who sends needs the cores that compute.
    """

    budget: int
    device: str = "cpu"
    tier: str = "disk"
    out: float = 0.0
    back: float = 0.0
    staging: int = 0
    call: float = 0.0
    drag: float = 0.0
    homes: bool = False  # whether parameters, gradients and states may live there
    only_states: bool = False  # and of these none but states
    window: int = 0
    ahead: int = 0
    turns: bool = False
    stepping: float = 0.0
    capacity: int = 1 << 62  # bytes that the far tier takes
    wire: str = ""
    narrow: float = 0.0
    widen: float = 0.0
    net: float = 0.0
    latency: float = 0.0
    strain: float = 0.0

    def __str__(self) -> str:
        far = f"{self.tier} {self.out:.0f}/{self.back:.0f} MB/s" if self.out and self.back else "no far tier"
        cast = f", cast to {self.wire} at {self.narrow:.0f}/{self.widen:.0f} MB/s" if self.wire else ""
        net = f", net {self.net:.0f} MB/s after {self.latency:.0f} us" if self.net else ""
        steps = f", steps states at {self.stepping:.0f} MB/s" if self.stepping else ""
        return f"{self.device} {self.budget} bytes, {far}{steps}{cast}{net}"

    @property
    def hides(self) -> bool:
        """Whether an exchange behind which compute goes on takes less time than one for which it waits."""
        return self.strain < 1.0

    def houses(self, fn: str) -> bool:
        """Whether what such an op makes may live in the far tier: an input, or else a gradient."""
        return self.homes and (fn == "state" or not self.only_states)

    def toll_us(self, nbytes: int) -> float:
        """The microseconds that compute loses to one copy of so many bytes."""
        return self.call + self.drag * nbytes

    def cast_us(self, nbytes: int) -> float:
        """The microseconds that a value of so many bytes takes to be cast, out and back together."""
        return nbytes / self.narrow + nbytes / self.widen
