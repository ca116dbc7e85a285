"""Plans near the optimum, and the proof how near: relax, round, simulate, repair.

    bound 12.39 %   ->   whole 12.82 %, over the budget at two positions   ->   their rows   ->   12.83 %, fits

The simulator has the last word.  A position that it finds over the budget gets its rows; if it has them, what a re-run
takes while it runs is the reason, and an event's row says so.  From then on the program's objective is no bound.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property

from ..analysis.reuse_gaps import ReuseGaps
from ..ir.machine import Machine
from ..ir.trace import Trace
from ..lp import solver
from ..lp.model import PlanModel
from ..lp.problem import PlanProblem
from ..lp.relax import Relaxed, relax, spread_out
from ..lp.rounding import lp_preferences, placements, round_to_integers
from ..lp.solver import INFINITY, SearchLimits, Solution
from ..lp.transient_rows import add_recompute_row, add_reload_rows, positions_over_budget
from ..schedule.candidate import Candidate, make_candidate
from ..schedule.copy_timing import retime_copies
from ..schedule.schedule import Placement
from ..simulate.plan_result import PlanResult, Proposal
from .greedy import greedy_from
from .local_search import PlacementSwap, local_search
from .work import AIMING, NARROW, PROVING, work_for, work_of_ops

GAP = 0.005  # of the step: a gap at which the search ends
FAIR_GAP = 0.02  # of the step: a gap at which a plan is sought from the one without the far tier as well
NEGLIGIBLE_US = 20.0  # microseconds a step that nobody searches for
AIM = 0.8  # of this gap, so that a repair may cost something
POSITIONS = 12  # that get their rows at once
SMALL = 1_000  # columns: with fewer a search need not end early
LARGE = 5_000  # columns: of more the search with nothing fixed takes too long
# Thresholds as shares of the step.  The columns between their ends are rounded first, and mostly that is enough; what a
# wider search finds may break the budget where what a narrow one finds does not.
SEARCHES = (-INFINITY, 1e-4, INFINITY)
SEARCHES_OF_LARGE = (-INFINITY, 1e-4, 5e-4, 1e-3)
REPAIRS = 8
GRAIN = 0.001  # of the step: what a search with columns fixed leaves
MENDED = 1_500  # ops of plans that are mended beside the best
MENDING = 400_000  # ops that are simulated to mend a plan, where it is a plan alone that is sought
POLISHED = 200_000  # ops that are simulated to make a plan better
STREAMED = 4  # times fewer, where state lives far, for the times of copies are most of what can be won there
ROUNDS = 2  # in which rows of backward are solved then: the point of more is rounded no better


def optimize(trace: Trace, machine: Machine, until: float = INFINITY) -> Proposal:
    """The best plan found in which every value runs again or is sent away at most once; no decisions, if none fits.

    The search ends at `until`, as `time.monotonic` has it; without it, it does not depend on the clock.
    """
    if not solver.is_installed():
        return Proposal(())
    program = PlanProblem(ReuseGaps(trace), machine)
    return _Search(program, machine, until).run()


def optimize_no_offload(trace: Trace, machine: Machine, until: float = INFINITY) -> Proposal:
    """The same without the far tier; what is proven of that says nothing of plans that use it."""
    if not machine.link.out:
        return Proposal(())
    found = optimize(trace, machine.without_tier, until)
    return Proposal(found.plan, no_offload_us=found.any_us)


def optimize_uncast(trace: Trace, machine: Machine, until: float = INFINITY) -> Proposal:
    """The same with nothing cast for its way; what is proven of that says nothing of plans that cast."""
    if not (machine.cast.dtype and machine.link.out):
        return Proposal(())
    return Proposal(optimize(trace, replace(machine, cast=replace(machine.cast, dtype="")), until).plan)


class _Search:
    """The best plan so far, and what is proven."""

    def __init__(self, program: PlanProblem, machine: Machine, until: float) -> None:
        self.program = program
        self.machine = machine
        self.until = until
        self.model = PlanModel(program, machine.budget, until)
        self.step_us = program.captured.us
        self.work = work_for(program.size, self.step_us)
        self.narrow = NARROW * work_of_ops(program.size)
        self.best: PlanResult | None = None
        self.state: Candidate  # of the best
        self.choices: dict[Candidate, PlanResult] = {}  # with what is proven by now
        self.polished: list[Candidate] = []  # what is no point's
        self.begun: list[dict[str, Placement]] = []  # which were polished
        self.bound_us = self.any_us = self.home_us = 0.0
        self.relaxed: Solution
        self.point: Solution | None = None  # of the best plan, for the next search to begin with
        self.rows = 0  # that the relaxed point keeps
        self.events: list[int] = []  # rows that are no part of a proof
        self.fetches: list[int] = []  # those of them that say what re-runs fetch
        self.second = False  # whether it is another search, with these from the beginning
        self.charged = not program.states  # whether they hold, as far as there are any

    def run(self) -> Proposal:
        relaxed = relax(self.model, PROVING * self.work if self._is_visited else INFINITY)
        if relaxed is None or not self._begin(relaxed):
            return Proposal((), any_us=self.any_us)
        shares = SEARCHES if len(self.model.lp.costs) <= LARGE else SEARCHES_OF_LARGE
        for share in shares:
            if relaxed.out_of_work or (self._is_cut_short and share > shares[0]):
                break  # what pays for its fetches is rounded better
            if share == shares[-1]:
                self._polish()
                if self.polished and shares is SEARCHES_OF_LARGE:
                    break  # a search for so many columns takes most of the time, and its points wait as those before
            elif self.model.lp.out_of_work:
                continue  # of the same work a wider search makes less
            if not self._is_near():
                self._round(share * self.step_us, last=share == shares[-1])
            if self._is_near():
                break
        ran_out = relaxed.out_of_work or self.model.lp.out_of_work
        if self._is_cut_short or (self._is_visited and ran_out and not self._is_as_proven):
            self._again()
            if self._is_cut_short and shares is SEARCHES and not relaxed.out_of_work:
                self._round(INFINITY, last=True)  # which proves more
        self._polish(ended=True)
        return Proposal(found.plan if (found := self._found) else (), self.bound_us, self.any_us, self.home_us)

    def _begin(self, relaxed: Relaxed) -> bool:
        """Take what is proven, and the point to round; whether there is one."""
        self.any_us = relaxed.any_us
        if relaxed.solution is None:
            return False
        self.relaxed, self.rows = relaxed.solution, self.model.lp.row_count
        self.bound_us = max(0.0, relaxed.solution.us - self.model.columns.tie_us)
        return True

    @cached_property
    def _is_visited(self) -> bool:
        """Whether there is state that may live far and that ops before the update read."""
        return any(resident.uses and not resident.is_gradient for resident in self.program.states)

    @property
    def _is_cut_short(self) -> bool:
        """Whether to leave the search, as far as it is for a plan, to others; see `_again`."""
        return self._is_visited and len(self.model.lp.costs) > SMALL and not self._is_as_proven

    def _again(self) -> None:
        """Other searches, of few rows and for a plan alone, in which re-runs pay from the beginning: with all that may
        leave, and with the state alone, which spares a slow tier.  The better goes on; if none fits, all are mended."""
        searches: list[_Search] = []
        for trips in (True, False):
            search = _Search(replace(self.program, offloads_activations=trips), self.machine, self.until)
            if time.monotonic() < self.until and not (searches and searches[0]._is_near()):
                searches += [search] if search._aim() else []
        found = sorted((each for each in searches if each.best), key=lambda each: each.state.forecast.us)
        for search in found[:1] or reversed(searches):
            if not found:
                search._round(-INFINITY, last=True)  # and mend
            elif not search._is_near() and not search.model.lp.out_of_work:
                search._round(SEARCHES[1] * self.step_us, last=False)
            if search.best:
                self._take(search.state)
                break

    @property
    def _aiming(self) -> float:
        return AIMING[self.program.offloads_activations] * self.work if self.second else INFINITY

    def _aim(self) -> bool:
        """Search for a plan alone: what is proven is only what it aims at.  Whether there is a point to round."""
        self.second = True
        relaxed = relax(self.model, self._aiming, ROUNDS) if self._charge() else None
        if relaxed is None or relaxed.out_of_work or not self._begin(relaxed):
            return False
        self._round(-INFINITY, last=False)
        return True

    def _prove(self, us: float) -> None:
        if not self.events:
            self.bound_us = max(self.bound_us, us - self.model.columns.tie_us)

    def _is_near(self) -> bool:
        if self._found is None:
            return False
        best = self._choice(self._found)
        return best.forecast.us - best.lower_bound <= max(GAP * best.lower_bound, NEGLIGIBLE_US)

    @property
    def _is_as_proven(self) -> bool:
        """Whether the best plan takes little longer than is proven."""
        return self._found is not None and self._found.forecast.us <= (1 + FAIR_GAP) * (self.step_us + self.bound_us)

    @property
    def _found(self) -> Candidate | None:
        """The best plan, a point's or not.  Where values run again twice less is proven: it has to be worth that."""
        found = [*([self.state] if self.best else []), *self.polished]
        lost = {True: 0.0, False: GAP * self.step_us}
        return min(found, key=lambda each: each.forecast.us + lost[self._choice(each).is_single], default=None)

    def _choice(self, state: Candidate) -> PlanResult:
        proven = self.bound_us, self.any_us
        known = self.choices.get(state)
        if known is None or (known.bound_us, known.any_us) != proven:
            known = self.choices[state] = PlanResult(state.plan, self.program.captured, state.forecast, *proven)
        return known

    @property
    def _most_us(self) -> float:
        """What a plan may add to be near."""
        return self.bound_us + max(GAP * (self.step_us + self.bound_us), NEGLIGIBLE_US)

    @property
    def _near_us(self) -> float:
        """The bound with which the best plan would be near."""
        if self._found is None:
            return INFINITY
        us = self._found.forecast.us
        return min(us / (1 + GAP), us - NEGLIGIBLE_US) - self.step_us + self.model.columns.tie_us

    def _effort(self, threshold: float, last: bool) -> SearchLimits | None:
        """How hard to search: with columns fixed, only as long as a plan may be near, if a wider search follows."""
        left = min(self.work - self.model.lp.search_work, self.narrow if self._is_cut_short else INFINITY)
        if left <= 0:
            return None
        target = self.bound_us + AIM * (self._most_us - self.bound_us)
        grain = GRAIN * self.step_us if len(self.model.lp.costs) > SMALL else 0.0
        if threshold == INFINITY:
            return SearchLimits(target, self._near_us if grain else INFINITY, AIM * GAP / GRAIN * grain, left)
        if last:
            return SearchLimits(target, INFINITY, grain, left)
        return SearchLimits(target, self._most_us, grain, min(left, self.narrow))

    def _round(self, threshold: float, last: bool) -> None:
        """Round and repair, until a plan fits or nothing is left to mend.

        A point that misses the aim is mended only if no wider search follows, which is better.
        """
        if self.fetches and threshold < INFINITY and not self.charged:
            self._charge()
        for _ in range(REPAIRS):
            effort = self._effort(threshold, last)
            if effort is None or time.monotonic() >= self.until or not self._relax_again():
                break
            # One that is good enough already would end the search, though its plan is not.
            known = self.point if self.point and self.point.us > effort.target else None
            points, bound = round_to_integers(self.model, self.relaxed, threshold, effort, known)
            if threshold == INFINITY > bound:
                self._prove(bound)
            if not points:
                break
            states = self._try(points)
            near = last or points[0].us <= effort.target
            timed = states[0] if self.program.states else self._in_time(states[0])
            self._take(timed)
            tried = threshold == INFINITY and self._is_cut_short  # with what re-runs fetch
            if not (self.charged or tried) and self._waits(states[0], points[0]) and self._charge():
                continue
            if self._is_near() or states[0].peak <= self.machine.budget or not near:
                break
            if time.monotonic() >= self.until or self._mend(states, timed, last):
                break
        self._forget_events()

    def _try(self, points: list[Solution]) -> list[Candidate]:
        """What the points come to, as far as they may be better than the best plan."""
        states: list[Candidate] = []
        for point in points:
            if states and time.monotonic() >= self.until:
                break
            if not states or self.best is None or self.step_us + point.us < self.best.forecast.us:
                states.append(self._carried_out(point))
                if self._take(states[-1]) and self.state is states[-1]:
                    # Where copies wait for each other, others of the same objective may be better: look for these.
                    self.point = point if self._is_as(point) else None
        return states

    def _carried_out(self, point: Solution) -> Candidate:
        """A point's plan.  Where state lives far its copies are timed: with what stays from one visit to the next
        because a fetch would take longer than that lasts; or with what stays only because there is room."""
        found, inputs = placements(self.model, point), self.program.gaps.streamable.inputs
        if not self.program.states:
            return make_candidate(self.program.gaps, self.machine, found)
        visits = {storage: Placement.STREAM if storage in inputs else fate for storage, fate in found.items()}
        each = (found, visits) if visits != found else (found,)
        states: list[Candidate] = []
        for one in each:
            if not states or time.monotonic() < self.until:
                states.append(self._in_time(make_candidate(self.program.gaps, self.machine, one)))
        return min(states, key=lambda state: (max(0, state.peak - self.machine.budget), state.forecast.us))

    def _is_as(self, point: Solution) -> bool:
        """Whether the best plan takes hardly longer than its point says."""
        return self.state.forecast.us <= self.step_us + point.us + GRAIN * self.step_us

    def _waits(self, state: Candidate, point: Solution) -> bool:
        """Whether a plan that fits takes far longer than its point says."""
        return state.peak <= self.machine.budget and state.forecast.us > (1 + FAIR_GAP) * (self.step_us + point.us)

    def _charge(self) -> bool:
        """Let re-runs pay for what they fetch, which no proof does; whether any fetches something."""
        self.fetches = self.fetches or add_reload_rows(self.model)
        for row in self.fetches:
            self.model.lp.set_row_upper(row, 1.0)
        self.events += self.fetches
        self.charged = True
        if self.fetches:
            self.rows = 0
        return bool(self.fetches)

    def _relax_again(self) -> bool:
        """Bring the relaxed point up to date with rows written since; whether there is one."""
        if self.rows != self.model.lp.row_count:
            solved = self.model.lp.solve(max(0.0, self._aiming - self.model.lp.relax_work))
            if solved is None:
                return False
            self.relaxed, self.rows = solved, self.model.lp.row_count
            self._prove(solved.us)
        return True

    def _in_time(self, state: Candidate) -> Candidate:
        """The same with other times for its copies."""
        plan, forecast = retime_copies(self.program.gaps, self.machine, state.plan, state.forecast, self.until)
        return replace(state, plan=plan, forecast=forecast)

    def _mend(self, states: list[Candidate], timed: Candidate, last: bool) -> bool:
        """Whether what the greedy pass makes of the plans is near enough; if not, what breaks the budget in the first
        gets rows."""
        most, ops = 1 + MENDED // max(1, self.program.size), INFINITY
        if self.second:  # the greedy pass takes longer than all else
            most, ops = int(last and self.best is None), MENDING
        for each in states[:most]:
            mended = greedy_from(self.program.gaps, self.machine, each, self.until, ops)
            if not self._take(mended):
                self._take(self._in_time(mended))
        # Other times for its copies may do, and cost too much.
        worst = (timed if timed.peak > self.machine.budget else states[0]).forecast
        over = sorted(positions_over_budget(self.program, worst, self.machine.budget), key=lambda found: -found[1])
        new = [position for position, _, _ in over if position not in self.model.memory.positions]
        for position in spread_out(new, POSITIONS):
            self.model.memory.add(position)
        if not new:
            self.events += [add_recompute_row(self.model, worst, index, position) for position, _, index in over]
        return self._is_near()

    def _take(self, state: Candidate) -> bool:
        """Whether a plan fits; it is kept if it is the best so far."""
        if state.peak > self.machine.budget:
            return False
        if self.best is None or state.forecast.us < self.best.forecast.us:
            self.best, self.state = PlanResult(state.plan, self.program.captured, state.forecast), state
        return True

    def _polish(self, ended: bool = False) -> None:
        """Links are fluid to the program, so that a plan may wait for copies of which its point knows nothing.  The
        search goes on from its own points: what it mends is not what is polished."""
        if not self.machine.link.out or self._is_near() or time.monotonic() >= self.until:
            return
        starts = self._begin_with if self.best else self._at_home
        if ended and self._found and not self._is_as_proven:
            starts = [*starts, *self._at_home]
        tries = POLISHED // max(1, self.program.size) // (STREAMED if self.program.states else 1)
        for start in starts:
            if start.placements not in self.begun and not self._is_near():
                self.begun.append(start.placements)
                self.polished.append(self._in_time(local_search(self.program, start, tries, self.until, self._wanted)))

    @cached_property
    def _wanted(self) -> list[PlacementSwap]:
        return lp_preferences(self.model, self.relaxed)

    @property
    def _begin_with(self) -> list[Candidate]:
        """What is polished of a plan that fits: as it is without other times for its copies, which take too long to be
        found for each try.  With another fate one would not fit that does so only because of these."""
        plain = make_candidate(self.program.gaps, self.machine, self.state.placements)
        return [plain] if plain.peak <= self.machine.budget else self._at_home

    @cached_property
    def _at_home(self) -> list[Candidate]:
        """The best plan without the far tier that is soon found, if there is one: where no point fits, links are the
        reason."""
        machine = self.machine.without_tier
        search = _Search(PlanProblem(self.program.gaps, machine), machine, self.until)
        search.work, search.narrow = int(NARROW * search.work), NARROW * search.narrow
        self.home_us = search.run().any_us
        return [search.state] if search.best else []

    def _forget_events(self) -> None:
        kept = {*self.fetches} if self.second else set[int]()
        for row in (gone := {*self.events} - kept):
            self.model.lp.set_row_upper(row, INFINITY)
        if gone:
            self.rows = 0  # the point may be another without them
        self.events = [*kept]
        self.charged = self.second or not self.program.states
