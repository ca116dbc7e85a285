"""The ranks that plan a step together, or a rank alone.

rank 0: 10 us for mm, budget 2 GB     rank 1: 12 us, 1 GB     ->    both plan with 10 us and 1 GB

Measure how fast the ranks of a group reduce buckets, and how much that slows compute down.

    measure_network(machine, ...)   ->   880 bytes per microsecond after 310 microseconds; interference 0.3

Measured at first use, with the reductions that backward uses, and cached; rank 0's numbers count on all ranks.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from passes import Machine, Network, PlanResult, Trace
from passes.order.comm_order import sequence
from passes.shards import Bucket

from ..errors import AgreementError
from ..oss import OSS
from ..oss.comm.consensus import NEW, announce_failure, check_same_step, digest
from ..oss.compiled.joint_planning import JointPlanner
from ..oss.sharded_grads import GradReduction
from ..runtime.step_parts import RankCheck
from ..system.measurement_cache import read_cached, write_cached
from ..system.setting import environment_key

Search = Callable[[Trace, Machine], PlanResult]
SMALL, LARGE, LEAST = 1 << 10, 4 << 20, 1 << 16  # bytes of a small bucket, of a large one, and the least of that
WIDTH = 512  # of the matrices that are multiplied meanwhile
TRIES = 4  # the fastest counts: the first one opens connections

Speed = tuple[float, float, float]  # bytes per microsecond, microseconds of latency, strain
_speeds: dict[str, Speed] = {}


class Ranks:
    """A rank alone: everything stays as it is."""

    plan_together = False

    def check_new_step(self) -> None:
        """Wait until all ranks are about to plan a new step."""

    def least_budget(self, budget: int) -> int:
        """Return the smallest budget of all ranks."""
        return budget

    def with_network(self, machine: Machine, room: int) -> Machine:
        """Return the machine with the network between the ranks, if the step uses it."""
        return machine

    def reporting_errors(self) -> AbstractContextManager[None]:
        """Tell the other ranks about errors raised inside."""
        return nullcontext()

    def share_trace(self, trace: Trace) -> Trace:
        """Return the trace with the same prices on all ranks."""
        return trace

    def share_machine(self, machine: Machine) -> Machine:
        """Return the same machine on all ranks."""
        return machine

    def choose(self, trace: Trace, machine: Machine, search: Search) -> PlanResult:
        """Return the plan that `search` finds, on rank 0 if there are several."""
        return search(trace, machine)

    def step_check(self, trace: Trace) -> RankCheck:
        """Return how the ranks agree on a step before each of its runs."""
        return RankCheck()


class JointRanks(Ranks):
    """The ranks of a sharded optimizer; `exchanges` if this step reduces gradients or gathers parameters."""

    plan_together = True

    def __init__(self, optimizer: OSS, device: torch.device, exchanges: bool) -> None:
        self.optimizer, self.device, self.exchanges = optimizer, device, exchanges
        self.planner = JointPlanner(optimizer.comm, device)

    def check_new_step(self) -> None:
        check_same_step(self.optimizer.comm, NEW)()

    def least_budget(self, budget: int) -> int:
        return self.planner.minimum(budget)

    def with_network(self, machine: Machine, room: int) -> Machine:
        return measure_network(machine, self.optimizer, self.planner, room) if self.exchanges else machine

    def reporting_errors(self) -> AbstractContextManager[None]:
        return self.planner.reporting_errors()

    def share_trace(self, trace: Trace) -> Trace:
        return self.planner.share_trace(trace)

    def share_machine(self, machine: Machine) -> Machine:
        return self.planner.share_machine(machine)

    def choose(self, trace: Trace, machine: Machine, search: Search) -> PlanResult:
        return self.planner.share_plan(trace, machine, search)

    def step_check(self, trace: Trace) -> RankCheck:
        if not self.exchanges:
            return RankCheck()
        exchanged = sequence(trace)
        failure = partial(announce_failure, self.optimizer.comm)
        return RankCheck(partial(self._begin_check, exchanged), self._compare_guards, failure)

    def _compare_guards(self, failure: str) -> None:
        """
        Raises:
            AgreementError: ranks have found different values.
        """
        try:
            check_same_step(self.optimizer.comm, digest(failure))()
        except AgreementError as error:
            found = failure or "this rank's values are those of the capture"
            raise AgreementError(
                f"forward branches on values, and they differ between ranks ({found}): with a sharded optimizer all "
                "ranks take the same branch, so reduce the value over the ranks outside of the module, and give it the "
                f"result, as collectives in forward can't be captured; the step is undone on all ranks\n{error}"
            ) from None

    def _begin_check(self, exchanged: str) -> Callable[[], None]:
        own = digest(f"{exchanged}\n{sorted(self.optimizer.pending_gathers.buckets)}")
        return check_same_step(self.optimizer.comm, own)


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
