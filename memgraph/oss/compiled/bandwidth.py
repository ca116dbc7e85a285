"""Measure how fast the ranks of a group reduce buckets, and how much that slows compute down.

    measure_network(machine, ...)   ->   880 bytes per microsecond after 310 microseconds; interference 0.3

Measured at first use, with the reductions that backward uses, and cached; rank 0's numbers count on all ranks.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from passes import Machine, Network
from passes.shards import Bucket

from ...system.measurement_cache import read_cached, write_cached
from ...system.setting import environment_key
from ..optimizer import OSS
from ..sharded_grads import GradReduction
from .joint_planning import JointPlanner

SMALL, LARGE, LEAST = 1 << 10, 4 << 20, 1 << 16  # bytes of a small bucket, of a large one, and the least of that
WIDTH = 512  # of the matrices that are multiplied meanwhile
TRIES = 4  # the fastest counts: the first one opens connections

Speed = tuple[float, float, float]  # bytes per microsecond, microseconds of latency, strain
_speeds: dict[str, Speed] = {}


def measure_network(machine: Machine, oss: OSS, planner: JointPlanner, room: int) -> Machine:
    """Return the machine with its network, measured within `room` bytes of the least rank if that is enough at all."""
    quarter = max(LEAST, planner.minimum(room) // 4)
    large = min(LARGE, 1 << quarter.bit_length() - 1)
    device, comm, reduction = torch.device(machine.device), oss.comm, GradReduction(oss.layout, oss.comm)
    where = f"{dist.get_backend(comm.group)} {comm.ranks} ranks on {planner.count_distinct(platform.node())} hosts"
    how = f"{comm.wire} {reduction.shared_memory is not None}"
    sizes = (LARGE >> i for i in range((LARGE // large).bit_length()))  # what was measured with more room is better
    *better, key = (f"net {SMALL, size} {WIDTH} {where} {how} {environment_key(device)}" for size in sizes)
    known = (_speeds.get(each) or _read(read_cached(each)) for each in (*better, key))
    speed = next((each for each in known if each is not None), None)
    if not planner.minimum(int(speed is not None)):  # some rank has no cached measurement
        speed = _Measurement(reduction, comm.ranks, device, large).speed()
        write_cached(key, speed)
    assert speed is not None
    _speeds[key] = speed
    return replace(machine, network=Network(*planner.of_first_rank(speed)))


def _read(cached: object) -> Speed | None:
    return (float(cached[0]), float(cached[1]), float(cached[2])) if isinstance(cached, list) else None


@dataclass(frozen=True, eq=False)
class _Measurement:
    """Reductions that all ranks run at the same time."""

    reduction: GradReduction
    ranks: int
    device: torch.device
    nbytes: int  # of a large bucket; all that is measured takes about three times as much

    def speed(self) -> Speed:
        small, large = (_fastest_us(self._reduce(nbytes), self.device) for nbytes in (SMALL, self.nbytes))
        net = (self.nbytes - SMALL) / max(large - small, 1.0)
        times = 1 + int(2 * large / _fastest_us(self._compute(1), self.device))  # longer than the reduction
        alone = _fastest_us(self._compute(times), self.device)
        both = _fastest_us(self._reduce(self.nbytes, self._compute(times)), self.device)
        return net, small, max(0.0, both - alone) / large

    def _reduce(self, nbytes: int, meanwhile: Callable[[], object] = lambda: None) -> Callable[[], Tensor]:
        part = nbytes // 4 // self.ranks
        bucket, sent = Bucket(0, (), part), torch.ones(part * self.ranks, device=self.device)

        def run() -> Tensor:
            wait = self.reduction.reduce(bucket, sent)
            meanwhile()
            return wait()

        return run

    def _compute(self, times: int) -> Callable[[], object]:
        width = min(WIDTH, math.isqrt(self.nbytes // 8))
        a, out = (torch.ones(width, width, device=self.device) for _ in range(2))
        return lambda: [torch.mm(a, a, out=out) for _ in range(times)]


def _fastest_us(run: Callable[[], object], device: torch.device) -> float:
    """Return the microseconds of the fastest run; each begins about when all ranks have ended the one before."""
    times = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        times.append((time.perf_counter() - begin) * 1e6)
    return min(times)
