"""How fast the ranks of a group exchange buckets, what each exchange takes besides its bytes, and of compute.

    with_network(machine, ...)   ->   880 bytes per microsecond, after 310 microseconds; strain 0.3

Measured at first use, as backward exchanges them, and kept with the costs; rank 0's numbers are those of all.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from passes import Machine
from passes.shards import Bucket

from ...system.measurement_cache import read_cached, write_cached
from ...system.setting import environment_key
from ..optimizer import OSS
from ..sharded_grads import GradReduction
from .joint_planning import JointPlanner

SIZES = (1 << 10, 4 << 20)  # bytes of a small bucket, and of a large one
WIDTH = 512  # of the matrices that are multiplied meanwhile
TRIES = 4  # of which the fastest counts: the first one sets connections up

Speed = tuple[float, float, float]
_known: dict[str, Speed] = {}


def measure_network(machine: Machine, oss: OSS, together: JointPlanner) -> Machine:
    """The machine with the network between the ranks; a collective."""
    device, exchange = torch.device(machine.device), oss.comm
    where = (
        f"{dist.get_backend(exchange.group)} {exchange.ranks} ranks on {together.count_distinct(platform.node())} hosts"
    )
    key = f"net {SIZES} {WIDTH} {where} {exchange.wire} {oss.reachable_ranks is not None} {environment_key(device)}"
    found = _known.get(key) or _read(read_cached(key))
    if not together.minimum(int(found is not None)):  # a rank does not know it
        found = _Trial(GradReduction(oss), exchange.ranks, device).speed()
        write_cached(key, found)
    assert found is not None
    _known[key] = found
    net, latency, strain = together.of_first_rank(found)
    return replace(machine, net=net, latency=latency, strain=strain)


def _read(known: object) -> Speed | None:
    return (float(known[0]), float(known[1]), float(known[2])) if isinstance(known, list) else None


@dataclass(frozen=True, eq=False)
class _Trial:
    """Exchanges that all ranks make at the same time."""

    sums: GradReduction
    ranks: int
    device: torch.device

    def speed(self) -> Speed:
        small, large = (_shortest(self._exchange(nbytes), self.device) for nbytes in SIZES)
        net = (SIZES[1] - SIZES[0]) / max(large - small, 1.0)
        times = 1 + int(2 * large / _shortest(self._compute(1), self.device))  # longer than the exchange
        alone = _shortest(self._compute(times), self.device)
        both = _shortest(self._exchange(SIZES[1], self._compute(times)), self.device)
        return net, small, max(0.0, both - alone) / large

    def _exchange(self, nbytes: int, meanwhile: Callable[[], object] = lambda: None) -> Callable[[], Tensor]:
        part = nbytes // 4 // self.ranks
        bucket, sent = Bucket(0, (), part), torch.ones(part * self.ranks, device=self.device)

        def run() -> Tensor:
            wait = self.sums.averaged(bucket, sent)
            meanwhile()
            return wait()

        return run

    def _compute(self, times: int) -> Callable[[], object]:
        a, into = (torch.ones(WIDTH, WIDTH, device=self.device) for _ in range(2))
        return lambda: [torch.mm(a, a, out=into) for _ in range(times)]


def _shortest(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds of the fastest run; each begins where the one before has ended on all ranks, or nearly so."""
    found = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        found.append((time.perf_counter() - begin) * 1e6)
    return min(found)
