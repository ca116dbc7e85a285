"""The machine that a step runs on: the budget of its device, the link to its tier, the network between ranks.

    Machine(8 << 30, link=Link(out=2500.0, back=2500.0))   ->   cpu 8589934592 bytes, disk 2500/2500 MB/s

Bytes are ints.  Rates are bytes per microsecond: 1.0 is 1 MB/s, 1000.0 is 1 GB/s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

RATES = {  # the measured fields of each part of a machine, and what they are where nothing is measured
    "link": {"out": 1000.0, "back": 1000.0, "call_us": 100.0, "us_per_byte": 0.0},
    "cast": {"out": 1000.0, "back": 1000.0},
    "network": {"rate": 1000.0, "latency_us": 100.0, "interference": 0.0},
    "streaming": {"host_update_rate": 1000.0},
}
CASTABLE = {"bf16": "f32"}  # the type of values that may be cast to each: of the same range, so that none overflows
CAST_WORKSPACE = 16384  # bytes that the cast before a copy may allocate and free
SMALLEST_STREAMED = 1 << 16  # bytes of an input or a gradient; smaller ones stay on the device


@dataclass(frozen=True)
class Link:
    """The link between a device and its tier, in both directions.  Without a rate there is no tier.

    Attributes:
        out, back: measured rates to the tier and from it.
        staging: bytes of the device that copies take, as soon as a plan has one.
        call_us: compute time that a copy takes to begin and to end.
        us_per_byte: compute time that a copy takes per byte, as its threads share cores with compute.
        half_duplex: True if copies out and back take turns, first in, first out, as on a disk.
        capacity: bytes that the tier holds.
    """

    out: float = 0.0
    back: float = 0.0
    staging: int = 0
    call_us: float = 0.0
    us_per_byte: float = 0.0
    half_duplex: bool = False
    capacity: int = 1 << 62

    @property
    def works(self) -> bool:
        """Return True if values can be copied in both directions."""
        return self.out > 0 < self.back

    def overhead_us(self, nbytes: int) -> float:
        """Return the microseconds that compute loses to one copy."""
        return self.call_us + self.us_per_byte * nbytes


@dataclass(frozen=True)
class Tier:
    """A place for values behind the device, by its name and the link to it."""

    name: str
    link: Link


@dataclass(frozen=True)
class Cast:
    """The cast of values for their copy to the tier.

    Attributes:
        dtype: the type that values may be cast to, as "bf16"; empty if copies are exact.
        out, back: bytes of the uncast value per microsecond of compute, before the copy and after it.
    """

    dtype: str = ""
    out: float = 0.0
    back: float = 0.0

    def us(self, nbytes: int) -> float:
        """Return the microseconds of both casts of a value."""
        return nbytes / self.out + nbytes / self.back


@dataclass(frozen=True)
class Network:
    """The network between the ranks of a group.

    Attributes:
        rate: bytes per microsecond of one collective; 0.0 if there is none.
        latency_us: time that a collective takes besides.
        interference: share of its time that compute loses to a collective, as the sender needs cores on a CPU.
    """

    rate: float = 0.0
    latency_us: float = 0.0
    interference: float = 0.0

    def us(self, nbytes: int) -> float:
        """Return the microseconds of a collective, or of a message."""
        return self.latency_us + nbytes / self.rate if self.rate else 0.0

    @property
    def overlaps_comm(self) -> bool:
        """Return True if a collective beside compute costs less than waiting for it."""
        return self.interference < 1.0


@dataclass(frozen=True)
class Streaming:
    """The streaming of parameters, gradients and optimizer states, and the update of what is offloaded.

    Attributes:
        enabled: True if any of them may be offloaded.
        only_states: True if parameters and gradients stay on the device.
        window: bytes of the device that an update takes which reads from the tier.
        update_staging: bytes of these that stay taken from the first such update on, where updates run in backward.
            The next update is reloaded into them early, and the last one is offloaded from them late.
        host_update_rate: rate of updates on the host, in bytes of the states; 0.0 if the host updates none.
    """

    enabled: bool = False
    only_states: bool = False
    window: int = 0
    update_staging: int = 0
    host_update_rate: float = 0.0

    def can_offload(self, fn: str) -> bool:
        """Return True if the value of such an op may be offloaded: of an input, or else of a gradient."""
        return self.enabled and (fn == "state" or not self.only_states)


@dataclass(frozen=True)
class Machine:
    """A device with a budget, and what surrounds it.

    Attributes:
        tier, link: the tier that values go to if a plan names none, and the link to it.
        behind: the tiers for what that one has no room for, the nearest first.
    """

    budget: int
    device: str = "cpu"
    tier: str = "disk"
    link: Link = Link()
    cast: Cast = Cast()
    network: Network = Network()
    streaming: Streaming = Streaming()
    behind: tuple[Tier, ...] = ()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers that values can be copied to, the nearest first."""
        return (Tier(self.tier, self.link), *self.behind) if self.link.works else ()

    def link_to(self, tier: str) -> Link:
        """Return the link to a tier, by its name; empty for the nearest."""
        return next((each.link for each in self.behind if each.name == tier), self.link)

    @property
    def joined(self) -> Machine:
        """The same machine with one tier in place of several, to which no plan copies slower than to those."""
        return replace(self, link=_joined([each.link for each in self.tiers]), behind=()) if self.behind else self

    @property
    def without_tier(self) -> Machine:
        """The same machine, on which nothing can be offloaded."""
        return replace(self, link=replace(self.link, out=0.0, back=0.0), behind=())

    @property
    def nominal(self) -> Machine:
        """The same machine with rates that no process measures: with these each one finds the same plans."""
        link, cast, network, streaming = self.link, self.cast, self.network, self.streaming
        has = {
            "link": link.works, "cast": bool(cast.dtype), "network": network.rate > 0,
            "streaming": streaming.host_update_rate > 0,
        }  # fmt: skip
        known = [rate * has[part] for part, rates in RATES.items() for rate in rates.values()]
        return with_rates(self, [*known, *(rate for _ in self.behind for rate in RATES["link"].values())])

    def __str__(self) -> str:
        link, cast, network, host = self.link, self.cast, self.network, self.streaming.host_update_rate
        return ", ".join(
            (
                f"{self.device} {self.budget} bytes",
                *(f"{each.name} {each.link.out:.0f}/{each.link.back:.0f} MB/s" for each in self.tiers),
                *(["no tier"] * (not link.works)),
                *([f"updates states at {host:.0f} MB/s"] * (host > 0)),
                *([f"cast to {cast.dtype} at {cast.out:.0f}/{cast.back:.0f} MB/s"] * bool(cast.dtype)),
                *([f"net {network.rate:.0f} MB/s after {network.latency_us:.0f} us"] * (network.rate > 0)),
            )
        )


def rates(machine: Machine) -> list[float]:
    """Return everything that was measured of the machine's speed, in the order of `RATES`, then of further links."""
    parts = [getattr(getattr(machine, part), name) for part, names in RATES.items() for name in names]
    return [*parts, *(getattr(each.link, name) for each in machine.behind for name in RATES["link"])]


def with_rates(machine: Machine, measured: Sequence[float]) -> Machine:
    """Return the machine with these rates, in the same order."""
    left = iter(measured)
    parts = {
        part: replace(getattr(machine, part), **{name: next(left) for name in names}) for part, names in RATES.items()
    }
    behind = tuple(replace(each, link=_with_rates(each.link, left)) for each in machine.behind)
    return replace(machine, behind=behind, **parts)


def _with_rates(link: Link, left: Iterator[float]) -> Link:
    out, back, call_us, us_per_byte = (next(left) for _ in RATES["link"])
    return replace(link, out=out, back=back, call_us=call_us, us_per_byte=us_per_byte)


def _joined(links: Sequence[Link]) -> Link:
    """Return a link that is idle whenever one of these is, if each copies as many bytes as it can.

    On half-duplex links copies out and back share the time, in a way that differs from link to link: the joined link
    is as much faster as that may save.
    """
    out, back = sum(each.out for each in links), sum(each.back for each in links)
    spread = sum(max(each.out / out, each.back / back) for each in links)
    return Link(
        out * spread, back * spread, max(each.staging for each in links), min(each.call_us for each in links),
        min(each.us_per_byte for each in links), all(each.half_duplex for each in links),
        sum(each.capacity for each in links),
    )  # fmt: skip


def cast_type(type: str, dtype: str) -> str:
    """Return the type of a value cast to `dtype`: "f32[8, 4]" to "bf16[8, 4]"; empty if it may not be cast."""
    own, _, shape = type.partition("[")
    # A value of several tensors has several brackets.
    return f"{dtype}[{shape}" if CASTABLE.get(dtype) == own and "[" not in shape else ""
