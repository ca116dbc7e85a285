"""Plan a step on several ranks: the same trace, the same prices, the same plan.

    rank 0: mm 10 us, budget 2 GB     rank 1: mm 12 us, budget 1 GB     ->    both: mm 10 us, 1 GB, and rank 0's plan

Times are those of rank 0. Bytes are the largest of any rank, so that every rank keeps its budget. A rank with another
step to plan is an error on all ranks.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

import passes
from passes import Link, Machine, PlanResult, Storage, Trace
from passes.ir.machine import rates, with_rates

from ...errors import AgreementError, CollectiveError, MemgraphError, PlanError
from ...report.reuse_plan import reuse_plan
from ...report.saved_plan import SavedPlan, record_plan, without_prices
from ..comm.agreement import check_agreement, report_errors
from ..comm.consensus import ADVICE, announce_failure
from ..comm.rank_group import RankGroup, all_texts
from ..optimizer import OSS

PLANNING = "the planning of the step"
FINE = f"{PLANNING}: without error"


class JointPlanner:
    """The ranks of a group while they plan a step for `device`."""

    def __init__(self, comm: RankGroup, device: torch.device) -> None:
        self.comm, self.device = comm, device

    def reporting_errors(self) -> AbstractContextManager[None]:
        return report_errors(self.comm.watchdog, PLANNING, ADVICE)

    def minimum(self, number: int) -> int:
        return min(int(row) for row in self.comm.all_gather(self._integers([number]))[:, 0])

    def count_distinct(self, text: str) -> int:
        return len(set(all_texts(self.comm.watchdog, text.encode(), "count of hosts")))

    def share_trace(self, trace: Trace) -> Trace:
        """Return the trace with the same prices on all ranks."""
        lines = [FINE] + [f"line {i} of the step: {line}" for i, line in enumerate(str(_bare(trace)).splitlines())]
        check_agreement(self.comm.watchdog, lines, ADVICE)
        numbers = [*(op.workspace for op in trace.ops), *(op.nbytes for op in trace.ops)]
        largest = self.comm.maximum(self._integers(numbers)).tolist()
        us = self.of_first_rank([op.us for op in trace.ops])
        workspaces, sizes = largest[: len(us)], largest[len(us) :]
        ops = (replace(op, us=us[i], workspace=workspaces[i]) for i, op in enumerate(trace.ops))
        ops = (replace(op, makes=_resized(op.makes, sizes[i])) if op.fn == "state" else op for i, op in enumerate(ops))
        return replace(trace, ops=tuple(ops))

    def share_machine(self, machine: Machine) -> Machine:
        """Return the machine with rank 0's links, and each rank's share of the tier on its host."""
        check_agreement(self.comm.watchdog, [FINE], ADVICE)
        machine = with_rates(machine, self.of_first_rank(rates(machine)))
        hosts = all_texts(self.comm.watchdog, platform.node().encode(), "count of hosts")
        beside = hosts.count(platform.node().encode())
        link = self._shared(machine.link, beside)
        behind = tuple(replace(tier, link=self._shared(tier.link, beside)) for tier in machine.behind)
        enabled, window = bool(self.minimum(machine.streaming.enabled)), -self.minimum(-machine.streaming.window)
        streaming = replace(machine.streaming, enabled=enabled, window=window)
        return replace(machine, link=link, behind=behind, streaming=streaming)

    def _shared(self, link: Link, ranks: int) -> Link:
        """Return a link with the room that each of the ranks of a host has."""
        return replace(link, capacity=self.minimum(link.capacity // ranks))

    def share_plan(self, trace: Trace, machine: Machine, search: Callable[[Trace, Machine], PlanResult]) -> PlanResult:
        if self.comm.rank == 0:
            try:
                result = search(trace, machine)
            except passes.BudgetError as error:
                facts = {"error": str(error), "smallest": error.smallest, "released": error.released}
                self._send(json.dumps(facts))
                raise
            except BaseException as error:
                self._send(json.dumps({"error": f"{type(error).__name__}: {error}"}))
                raise
            self._send(record_plan(result, machine).to_json())
            return result
        text = self._send("")
        fields = json.loads(text)
        if "smallest" in fields:
            smallest, released = fields["smallest"], fields["released"]
            raise passes.BudgetError(fields["error"], machine.budget, smallest, released=released)
        if "error" in fields:
            raise PlanError(f"rank 0, which plans for all, has failed: {fields['error']}")
        return reuse_plan([SavedPlan.from_json(text)], trace, machine)

    def of_first_rank(self, numbers: Sequence[float]) -> list[float]:
        own = self.comm.tensor(numbers, torch.float64, self.device)
        return [float(number) for number in self.comm.all_gather(own)[0].tolist()]

    def _integers(self, numbers: Sequence[int]) -> Tensor:
        return self.comm.tensor(numbers, torch.int64, self.device)

    def _send(self, text: str) -> str:
        return all_texts(self.comm.watchdog, text.encode(), "plan of the step, which rank 0 makes")[0].decode()


def _bare(trace: Trace) -> Trace:
    """Return the trace without what may differ between ranks: prices, and the bytes of states."""
    bare = without_prices(trace)
    ops = (replace(op, makes=_resized(op.makes, 0)) if op.fn == "state" else op for op in bare.ops)
    return replace(bare, ops=tuple(ops))


def _resized(makes: tuple[Storage, ...], nbytes: int) -> tuple[Storage, ...]:
    return tuple(Storage(storage.name, nbytes) for storage in makes)


@contextmanager
def announcing_failure(optimizer: OSS | None, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Announce an error of this rank to the others, if they compare steps before a call that reads these parameters.

    This rank raises its own error.
    """
    try:
        yield
    except (AgreementError, CollectiveError):  # the others raise these, too
        raise
    except Exception:
        with suppress(MemgraphError):
            if optimizer is not None and _compares_steps(optimizer, parameters):
                announce_failure(optimizer.comm)
        raise


def _compares_steps(optimizer: OSS, parameters: Iterable[Tensor]) -> bool:
    if optimizer.comm.is_alone or not torch.is_grad_enabled() or not any(p.requires_grad for p in parameters):
        return False
    return optimizer.gather_mode == "forward" or bool(optimizer.sharded_grads.grad_buckets({}))
