"""Ranks that plan a step together: the same text, the same prices, the same plan.

    rank 0: mm 10 us, budget 2 GB     rank 1: mm 12 us, budget 1 GB     ->    both: mm 10 us, 1 GB, and rank 0's plan

What an op takes is rank 0's; what it needs at most is the largest of all, so that the promise holds on each. Whoever
has another step to plan is told so before anything hangs.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace

import torch
from torch import Tensor

import passes
from passes import Machine, PlanResult, Storage, Trace

from ...errors import AgreementError, CollectiveError, MemgraphError, PlanError
from ...report.reuse_plan import reuse_plan
from ...report.saved_plan import SavedPlan, record_plan, without_prices
from ..comm.agreement import check_agreement, report_errors
from ..comm.consensus import ADVICE, announce_failure
from ..comm.exchange import BucketComm
from ..comm.texts import texts
from ..optimizer import OSS

SPEEDS = ("out", "back", "call", "drag", "narrow", "widen", "net", "latency", "strain")
PLANNING = "the planning of the step"
FINE = f"{PLANNING}: without trouble"


class JointPlanner:
    """The ranks of a group while they plan."""

    def __init__(self, exchange: BucketComm, device: torch.device) -> None:
        self.comm, self.device = exchange, device

    def reporting_errors(self) -> AbstractContextManager[None]:
        """Around what comes before `trace` or `machine`: what fails here on a rank, the others are told there."""
        return report_errors(self.comm.watchdog, PLANNING, ADVICE)

    def minimum(self, number: int) -> int:
        """The least of the numbers that the ranks have."""
        return min(int(row) for row in self.comm.each(self._integers([number]))[:, 0])

    def count_distinct(self, text: str) -> int:
        """How many different texts the ranks have."""
        return len(set(texts(self.comm.watchdog, text.encode(), "count of hosts")))

    def share_trace(self, trace: Trace) -> Trace:
        """The step with one price for all ranks.

        Raises:
            AgreementError: a rank has another step, or has failed.
        """
        lines = [FINE] + [f"line {i} of the step: {line}" for i, line in enumerate(str(_bare(trace)).splitlines())]
        check_agreement(self.comm.watchdog, lines, ADVICE)
        numbers = [*(op.workspace for op in trace.ops), *(op.nbytes for op in trace.ops)]
        most = self.comm.most(self._integers(numbers)).tolist()
        us = self.of_first_rank([op.us for op in trace.ops])
        works, sizes = most[: len(us)], most[len(us) :]
        ops = (replace(op, us=us[i], workspace=works[i]) for i, op in enumerate(trace.ops))
        ops = (replace(op, makes=_states(op.makes, sizes[i])) if op.fn == "state" else op for i, op in enumerate(ops))
        return replace(trace, ops=tuple(ops))

    def share_machine(self, machine: Machine) -> Machine:
        """The machine with links as fast as rank 0's, and room for each of the ranks that share a far tier.

        Raises:
            AgreementError: a rank has failed to find out how fast its own are.
        """
        check_agreement(self.comm.watchdog, [FINE], ADVICE)
        facts = asdict(machine)
        facts |= zip(SPEEDS, self.of_first_rank([facts[name] for name in SPEEDS]), strict=True)
        hosts = texts(self.comm.watchdog, platform.node().encode(), "count of hosts")
        room = machine.capacity // hosts.count(platform.node().encode())
        return replace(
            Machine(**facts),
            capacity=self.minimum(room),
            homes=bool(self.minimum(machine.homes)),
            window=-self.minimum(-machine.window),
        )

    def share_plan(self, trace: Trace, machine: Machine, search: Callable[[Trace, Machine], PlanResult]) -> PlanResult:
        """What rank 0 finds.

        Raises:
            BudgetError: it finds nothing that fits.
        """
        if self.comm.rank == 0:
            try:
                found = search(trace, machine)
            except passes.BudgetError as error:
                self._told(json.dumps({"error": str(error), "smallest": error.smallest}))
                raise
            except BaseException as error:
                self._told(json.dumps({"error": f"{type(error).__name__}: {error}"}))
                raise
            self._told(record_plan(found, machine).to_json())
            return found
        told = self._told("")
        facts = json.loads(told)
        if "smallest" in facts:
            raise passes.BudgetError(facts["error"], machine.budget, facts["smallest"])
        if "error" in facts:
            raise PlanError(f"rank 0, which plans for all, has failed: {facts['error']}")
        return reuse_plan([SavedPlan.from_json(told)], trace, machine)

    def of_first_rank(self, numbers: Sequence[float]) -> list[float]:
        """The numbers of rank 0."""
        given = self.comm.numbers(numbers, torch.float64, self.device)
        return [float(number) for number in self.comm.each(given)[0].tolist()]

    def _integers(self, numbers: Sequence[int]) -> torch.Tensor:
        return self.comm.numbers(numbers, torch.int64, self.device)

    def _told(self, text: str) -> str:
        """The text of rank 0."""
        return texts(self.comm.watchdog, text.encode(), "plan of the step, which rank 0 makes")[0].decode()


@contextmanager
def announcing_failure(optimizer: OSS | None, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Around what comes before `meet` in a call that reads these: what fails here on a rank, the others are told there,
    if they are sure to come.

    The rank itself raises its own error.
    """
    try:
        yield
    except (AgreementError, CollectiveError):  # which the others have, too
        raise
    except Exception:
        with suppress(MemgraphError):
            if optimizer is not None and _compares_steps(optimizer, parameters):
                announce_failure(optimizer.comm, optimizer.layout.device)
        raise


def _compares_steps(optimizer: OSS, parameters: Iterable[Tensor]) -> bool:
    """Whether ranks meet before they run a step with these parameters."""
    if optimizer.comm.is_alone or not torch.is_grad_enabled() or not any(one.requires_grad for one in parameters):
        return False
    return optimizer.gather_mode == "forward" or bool(optimizer.sharded_grads.grad_buckets({}))


def _bare(trace: Trace) -> Trace:
    """The step without what may differ from rank to rank: prices, and the bytes of states."""
    bare = without_prices(trace)
    ops = (replace(op, makes=_states(op.makes, 0)) if op.fn == "state" else op for op in bare.ops)
    return replace(bare, ops=tuple(ops))


def _states(makes: tuple[Storage, ...], nbytes: int) -> tuple[Storage, ...]:
    return tuple(Storage(made.name, nbytes) for made in makes)
