"""The ranks that plan a step together, or a rank alone.

rank 0: 10 us for mm, budget 2 GB     rank 1: 12 us, 1 GB     ->    both plan with 10 us and 1 GB
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from passes import Machine, PlanResult, Trace
from passes.order.comm_order import sequence

from ..errors import AgreementError
from ..oss import OSS
from ..oss.comm.consensus import NEW, announce_failure, check_same_step, digest
from ..oss.compiled.bandwidth import measure_network
from ..oss.compiled.joint_planning import JointPlanner
from ..runtime.step_parts import RankCheck

Search = Callable[[Trace, Machine], PlanResult]


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
