"""Plans near the optimum, and the proof how near: solve the linear program, round, simulate, repair, polish.

    bound 12.39 %   ->   rounded 12.82 %   ->   polished 12.71 %, at most 0.3 % above the best plan

Searches become wider and wider: each leaves more columns of the program free.  The first one that finds a plan near its
bound is the last.

Improve a plan that fits, one storage at a time: change its placement, if the step is faster then and still fits.

    {a: RECOMPUTE, b: OFFLOAD, c: OFFLOAD}   ->   {a: RECOMPUTE, b: RECOMPUTE, c: KEEP}, where c fits

First come the placements that the linear program leans to, as long as that helps.  Then what is not kept
is kept, or placed otherwise.  Each try is simulated, which counts what the program does not: copies that wait for each
other.

Search for a plan alone where ops read offloaded state, as proofs take most of the work there.

293 million parameters beside a disk   ->   one program in which recomputations pay for the reloads that they need
                                            one in which besides only state is offloaded, so that the disk carries
                                            no activations; the better plan wins
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..lp import solver
from ..lp.linear_program import INFINITY
from ..lp.problem import PlanProblem, StorageVar
from ..lp.relax import Relaxed, relax
from ..lp.rounding import lp_preferences
from ..schedule.candidate import Candidate, make_candidate
from ..schedule.schedule import Placement
from ..simulate.bound_proof import BoundProofs
from ..simulate.plan_result import Proposal, SearchInterrupted
from .rounding_search import RepairLimits, RoundingSearch
from .work import AIMING, PROVING, RELAXING, WorkLimits

LARGE = 5_000  # columns: with more, a search with none fixed takes too long
# Thresholds as shares of the step.  First the columns between their ends are rounded, which is mostly enough.  Plans of
# wider searches break the budget more often.
THRESHOLDS = (-INFINITY, 1e-4, INFINITY)
THRESHOLDS_OF_LARGE = (-INFINITY, 1e-4, 5e-4, 1e-3)
POLISHED = 200_000  # ops that local search may simulate
STREAMED = 4  # times fewer, where state is offloaded: most of what can be won there are the times of copies
PlacementSwap = tuple[str, Placement]  # a storage, and its new placement
ROUNDS = 2  # of rows of backward: solutions of more are rounded no better
REPAIR = RepairLimits(only_last=True, simulated=400_000)  # the greedy pass takes longer than all else


def optimize(trace: Trace, machine: Machine, until: float = INFINITY) -> Proposal:
    """Return the best plan found that recomputes and offloads each value at most once; no decisions if none fits.

    The search ends at `until`, as `time.monotonic` has it.  Without it, it does not depend on the clock.
    """
    if not solver.is_installed():
        return Proposal(())
    problem = PlanProblem(ReuseGaps(trace), machine)
    return Optimizer(problem, until, WorkLimits.for_step(problem.size, problem.captured.us, until)).run()


def prove(trace: Trace, machine: Machine, until: float = INFINITY) -> Proposal:
    """Return the bounds alone, in the time of the first step of a search; infinite if no plan of the class fits."""
    if not solver.is_installed():
        return Proposal(())
    problem = PlanProblem(ReuseGaps(trace), machine)
    search = RoundingSearch(problem, until, WorkLimits.for_step(problem.size, problem.captured.us))
    relaxed = relax(search.model, _relaxing(search))
    if time.monotonic() >= until:
        return Proposal(())  # a program that was not solved proves nothing
    if relaxed is None:
        return Proposal((), INFINITY, INFINITY)
    once = INFINITY if relaxed.solution is None else max(0.0, relaxed.solution.us - search.model.columns.tie_us)
    return Proposal((), once, relaxed.any_us, proofs=BoundProofs(relaxed.proof, relaxed.any_proof))


def optimize_no_offload(trace: Trace, machine: Machine, until: float = INFINITY) -> Proposal:
    """The same without offload.  Its bound says nothing of plans that offload."""
    if not machine.link.out:
        return Proposal(())

    def of_all(proposal: Proposal) -> Proposal:
        return Proposal(proposal.plan, no_offload_us=proposal.any_us)

    return _restated(lambda: optimize(trace, machine.without_tier, until), of_all)


def optimize_uncast(trace: Trace, machine: Machine, until: float = INFINITY) -> Proposal:
    """The same without casts.  Its bound says nothing of plans that cast."""
    if not (machine.cast.dtype and machine.link.out):
        return Proposal(())
    uncast = replace(machine, cast=replace(machine.cast, dtype=""))
    return _restated(lambda: optimize(trace, uncast, until), lambda proposal: Proposal(proposal.plan))


def _restated(search: Callable[[], Proposal], restate: Callable[[Proposal], Proposal]) -> Proposal:
    """Return what a search among fewer plans says of all plans, also if the user interrupts it."""
    try:
        return restate(search())
    except SearchInterrupted as interrupt:
        raise SearchInterrupted(restate(interrupt.proposal)) from interrupt


def _relaxing(search: RoundingSearch) -> float:
    """Return the work of solving the program without whole numbers."""
    return (PROVING if search.reads_offloaded_state else RELAXING) * search.work.total


class Optimizer:
    """The search for the plan of a problem: wider and wider rounding, and local search."""

    def __init__(self, problem: PlanProblem, until: float, work: WorkLimits) -> None:
        self.problem = problem
        self.until = until
        self.work = work
        self.search = RoundingSearch(problem, until, work)
        self.incumbent = self.search.incumbent
        self.no_offload_us = 0.0  # at most what any plan without offload adds
        self._polished: list[dict[str, Placement]] = []  # placements from which local search has begun

    def run(self) -> Proposal:
        """Return the best plan, and the bounds.

        Raises:
            SearchInterrupted: the user has interrupted the search, and a plan was found before.
        """
        try:
            return self._searched()
        except KeyboardInterrupt as interrupt:
            proposal = self._proposal()
            if not proposal.plan and isinstance(interrupt, SearchInterrupted):  # of the search without offload
                proposal = replace(proposal, plan=interrupt.proposal.plan)
            if not proposal.plan:
                raise KeyboardInterrupt from interrupt
            raise SearchInterrupted(proposal) from interrupt

    def _searched(self) -> Proposal:
        search, lp = self.search, self.search.model.lp
        relaxed = search.start(_relaxing(search))
        if relaxed is None:
            return Proposal((), any_us=self.incumbent.any_us, proofs=self.incumbent.proofs)
        is_large = len(lp.costs) > LARGE
        self._widen(relaxed, THRESHOLDS_OF_LARGE if is_large else THRESHOLDS)
        is_short = search.reads_offloaded_state and (relaxed.out_of_work or lp.out_of_work)
        if search.ends_early or (is_short and not self.incumbent.is_fair()):
            candidate = plan_with_state(search, self.work, THRESHOLDS[1] * search.step_us)
            if candidate is not None:
                self.incumbent.take(candidate)
            if search.ends_early and not is_large and not relaxed.out_of_work:
                search.round(INFINITY, last=True)  # raises the bound
        self._polish(ended=True)
        return self._proposal()

    def _proposal(self) -> Proposal:
        best = self.incumbent.best
        bounds = self.incumbent.bound_us, self.incumbent.any_us, self.no_offload_us
        return Proposal(best.plan if best else (), *bounds, self.incumbent.proofs)

    def _widen(self, relaxed: Relaxed, thresholds: tuple[float, ...]) -> None:
        """Round with more and more columns free, until a plan is near its bound."""
        search, lp = self.search, self.search.model.lp
        for threshold in thresholds:
            if relaxed.out_of_work or (search.ends_early and threshold > thresholds[0]):
                break
            is_last = threshold == thresholds[-1]
            if is_last:
                self._polish()
                if self.incumbent.polished and thresholds is THRESHOLDS_OF_LARGE:
                    break  # a search for so many columns takes most of the time, and its plans wait for copies as well
            elif lp.out_of_work:
                continue  # with the same work a wider search finds less
            if not self.incumbent.is_near():
                search.round(threshold * search.step_us, last=is_last)
            if self.incumbent.is_near():
                break

    def _polish(self, ended: bool = False) -> None:
        """Improve plans by local search, which counts what the program does not: copies that wait for each other.

        The rounding goes on from its own solutions.
        """
        incumbent, search = self.incumbent, self.search
        if not self.problem.machine.link.out or incumbent.is_near() or time.monotonic() >= self.until:
            return
        starts = self._without_retimed_copies(incumbent.rounded) if incumbent.rounded else self._no_offload
        if ended and incumbent.best and not incumbent.is_fair():
            starts = [*starts, *self._no_offload]
        tries = POLISHED // max(1, self.problem.size) // (STREAMED if self.problem.states else 1)
        for start in starts:
            if start.placements not in self._polished and not incumbent.is_near():
                self._polished.append(start.placements)
                polished = local_search(self.problem, start, tries, self.until, self._preferences)
                incumbent.polished.append(search.with_copies_retimed(polished))

    @cached_property
    def _preferences(self) -> list[PlacementSwap]:
        return lp_preferences(self.search.model, self.search.relaxed)

    def _without_retimed_copies(self, candidate: Candidate) -> list[Candidate]:
        """Return the start of a local search, which does not retime copies for each try.

        If the plan fits only with other times for its copies, it begins without offload.
        """
        plain = make_candidate(self.problem.gaps, self.problem.machine, candidate.placements)
        return [plain] if plain.peak <= self.problem.machine.budget else self._no_offload

    @cached_property
    def _no_offload(self) -> list[Candidate]:
        """The best plan without offload that is found in little work, if there is one."""
        problem = PlanProblem(self.problem.gaps, self.problem.machine.without_tier)
        other = Optimizer(problem, self.until, self.work.smaller)
        self.no_offload_us = other.run().any_us
        return [other.incumbent.rounded] if other.incumbent.rounded else []


def local_search(
    problem: PlanProblem, start: Candidate, tries: int, until: float, preferences: Sequence[PlacementSwap] = ()
) -> Candidate:
    """Return the plan after so many tries, or after those before `until`, as `time.monotonic` has it."""
    search = _LocalSearch(problem, start, tries, until)
    while preferences and search.take(preferences):
        """What did not fit may fit now."""
    search.take(_swaps(problem, start))
    return search.candidate


class _LocalSearch:
    """The best plan so far, and the swaps that failed since it was found."""

    def __init__(self, problem: PlanProblem, start: Candidate, tries: int, until: float) -> None:
        self.problem, self.candidate, self.tries, self.until = problem, start, tries, until
        self.failed: set[PlacementSwap] = set()

    def take(self, swaps: Iterable[PlacementSwap]) -> bool:
        """Try swaps in their order; return True if one helped."""
        before = self.candidate
        for storage, placement in swaps:
            if self.tries <= 0 or time.monotonic() >= self.until:
                return False
            is_new = self.candidate.placements.get(storage, Placement.KEEP) is not placement
            if is_new and (storage, placement) not in self.failed:
                self.tries -= 1
                self._try(storage, placement)
        return self.candidate is not before

    def _try(self, storage: str, placement: Placement) -> None:
        machine = self.problem.machine
        new = make_candidate(self.problem.gaps, machine, self.candidate.placements | {storage: placement})
        if new.forecast.us < self.candidate.forecast.us and new.peak <= machine.budget:
            self.candidate = new
            self.failed.clear()
        else:
            self.failed.add((storage, placement))


def _swaps(problem: PlanProblem, candidate: Candidate) -> Iterator[PlacementSwap]:
    """Yield the other placements of the storages that are not kept, the largest first."""
    placements = candidate.placements
    movable = [each for each in problem.storages if placements.get(each.storage, Placement.KEEP) is not Placement.KEEP]
    for each in sorted(movable, key=lambda each: (-each.nbytes, each.storage)):
        for placement in _placements(problem, each):
            yield each.storage, placement


def _placements(problem: PlanProblem, storage: StorageVar) -> Iterator[Placement]:
    yield Placement.KEEP
    if not problem.producers[storage.producer].runs_once:
        yield Placement.RECOMPUTE
    if storage.can_offload:
        yield Placement.OFFLOAD
    if storage.wire_nbytes:
        yield Placement.CAST_OFFLOAD


def plan_with_state(search: RoundingSearch, work: WorkLimits, threshold: float) -> Candidate | None:
    """Return the better plan of two searches that prove nothing; None if neither finds one.

    The better search goes on with columns free that cost less than `threshold` to change.  If neither has a plan, the
    greedy pass repairs what they have.
    """
    searches: list[RoundingSearch] = []
    for offloads_activations in (True, False):
        if time.monotonic() >= search.until or (searches and searches[0].incumbent.is_near()):
            break
        problem = replace(search.problem, offloads_activations=offloads_activations)
        limits = replace(work, relax=AIMING[offloads_activations] * work.total)
        other = RoundingSearch(problem, search.until, limits, REPAIR)
        if _aim(other):
            searches.append(other)
    planned = [(each.incumbent.rounded.forecast.us, i) for i, each in enumerate(searches) if each.incumbent.rounded]
    if planned:
        best = searches[min(planned)[1]]
        if not best.incumbent.is_near() and not best.model.lp.out_of_work:
            best.round(threshold, last=False)
        return best.incumbent.rounded
    for each in reversed(searches):
        each.round(-INFINITY, last=True)  # with repairs
        if each.incumbent.rounded:
            return each.incumbent.rounded
    return None


def _aim(search: RoundingSearch) -> bool:
    """Solve a program in few rounds, and round once; return True if it has a solution."""
    if not search.charge_reloads():
        return False
    relaxed = search.start(search.work.relax, ROUNDS)
    if relaxed is None or relaxed.out_of_work:
        return False
    search.round(-INFINITY, last=False)
    return True
