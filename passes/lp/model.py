"""The linear program of a plan: keep, recompute or offload each tensor, in the least time that fits the budget.

Forward leaves tensors that backward reads.  Between the two a plan keeps a tensor, which takes bytes; recomputes it,
which takes time; or copies it to the tier and back, which takes the links.  Here each of these is a number between 0
and 1.  Three kinds of rows tie them: what an op reads is available, the bytes at each position fit the budget, and the
links carry the copies in time.  Every plan is a solution with whole numbers.  So the least objective is a bound on the
time that a plan adds to the step, and a solution tells how to make a plan that is nearly as fast.

Names.  Positions t are indices of ops.  s is a storage of bytes[s], produced by op p(s), read by the producers w in
readers(s).  Forward reads it last at last[s], and backward first at first[s].  Where backward does not read it,
recomputations alone do; need[s] is then the first position that may, and due[s] the last.  o is a producer that
takes us[o].  r is a state: a parameter, a gradient or optimizer states.  Its uses k = 0, 1, ... begin at use[r, k], and
gap(r, t) says that t is between two of them.  j is a stage of forward or backward, u an update.

    keep[s], offload[s], cast[s]     the storage stays, is copied as it is, or is copied as a narrower type
    recompute[o]                     the op runs again in backward, once, when its result is first needed
    saved[s]                         keep[s] + offload[s] + cast[s]
    copied[s]                        bytes[s] offload[s] + wire_bytes[s] cast[s]
    offload[r], stay[r, k]           the state is offloaded; it stays on the device from use k - 1 to use k all the same
    reload[r, k]                     bytes[r] (offload[r] - stay[r, k]);  stay[r, 0] = 0
    reran[o, t]                      the op has run again before t
    present[s, t]                    the storage is on the device at t, kept or recomputed
    rerun_copy[s, t]                 the storage was reloaded before t for a recomputation
    out[j], grads_out[j]             bytes that have left by the end of stage j of forward; gradients, of backward
    back[j]                          bytes that have been reloaded by the end of stage j, of the same phase
    early[t], grads_left[t]          bytes reloaded before their use, and gradients that have left, at t
    wait[phase], extra[j]            microseconds that compute waits, and by which stage j takes longer than captured
    staging                          anything is copied
    windowed[u], extra[u]            the update runs in windows; it takes so many microseconds more than its own
    staged[u]                        it, or an update before it, leaves its windows on the device
    on_host[s], copies_us[s]         the host updates these states; time of the copies of their parameter and gradient

minimise  sum us[o] recompute[o] + sum 2 overhead[s] offload[s] + sum (casts[s] + 2 overhead[s]) cast[s]
          + overhead of each copy of a state + wait[forward] + wait[backward] + sum extra[u]

rows, and the function that adds them:

    needed by backward     saved[s] + recompute[p(s)] >= 1                                     _add_availability_rows
    chain                  saved[s] + recompute[p(s)] >= recompute[w]
    one form               saved[s] + recompute[p(s)] <= 1, if p(s) makes s alone; else saved[s] <= 1
    dominance              saved[s] <= sum recompute[w] over readers(s), if backward does not read s
    staging                offload[s] + cast[s] <= staging;  offload[r] <= staging
    tier                   sum copied[s] + sum bytes[r] offload[r] <= capacity                 _add_tier_row
    state                  stay[r, k] <= offload[r]                                            add_offload_rows
    update                 extra[u] >= (1 - share staged) bytes[r] offload[r] / link rates - us[u]
                           windowed[u] >= offload[r], <= sum of these, over r that u reads     add_update_rows
                           on_host[s] <= offload[s];  extra[u] >= sum bytes[s] on_host[s] / host rate - us[u]
                           copies_us[s] >= copies of its offloaded parameter and gradient, if the device updates s
                           copies_us[s] >= copies of those on the device, if the host does
                           staged[u] >= windowed[u], staged[u before]
    out                    out[j] <= out[j-1] + rate (length[j] + extra[j])                    bandwidth_rows
                           out[j] <= sum copied[s] over last[s] before the end of j; equal at the end of forward
                           grads_out likewise
    back                   back[j] <= back[j-1] + rate (length[j] + extra[j])
                           back[j] >= sum copied[s] over due[s], reload[r, k] over use[r, k], up to the end of j
    time                   sum extra[j] <= wait + what the plan's decisions add to compute, in each phase
    half duplex            time of a phase >= time of all its copies, where copies take turns
    forward t              fixed[t] + sum bytes[s] keep[s] + copied[s] over last[s] < t        memory_rows
                                    - out by t + rest <= budget
    backward t             fixed[t] + sum bytes[s] present[s, t] over last[s] < t < first[s] + rest <= budget
    any plan, backward t   in_use[t] + rest <= budget
    rest                   early[t] + staging bytes - sum bytes[r] (offload[r] - stay[r, k]) over gap(r, t)
                           - grads_left[t] + windows - workspace at an update, or what is staged behind one
                           + generator states of draws that run again later
    early                  early[t] >= back before t - sum copied[s] over need[s] <= t - reloads up to t
                                       - sum bytes[s] rerun_copy[s, t]
    grads left             grads_left[t] <= grads_out by t, sum bytes[r] offload[r] over gradients complete before t
    reran                  reran[o, t] <= recompute[o];  >= 1 - saved[s], s made by o with first[s] <= t
                           reran[o, t] >= reran[w, t] - saved[s];  = recompute[o] behind all needs of o
    present                present[s, t] >= reran[w, t];  rerun_copy[s, t] <= present[s, t], <= offload[s] + cast[s]
                           present[s, t] >= keep[s] + reran[p(s), t], if p(s) makes s alone
                           present[s, t] >= keep[s], reran[p(s), t] - offload[s] - cast[s], else
    present for reruns     present[s, t] >= keep[s] + reran[p(s), t] - reran[w, t], with one reader
                           present[s, t] >= (recompute - reran)[w] - (recompute - reran)[p(s)] - offload[s] - cast[s]
                           present[s, t] >= keep[s] + recompute[w] - 1 - reran[w, t], if p(s) makes several

Every plan of the class satisfies all rows.  In the class, forward and backward run in the trace's order; an op is
recomputed at most once, in backward; a storage is kept, offloaded or recomputed, and stays until its last use;
copies out end with their phase; a state is reloaded once for each use unless it stays; links carry while compute is
busy.  Memory that a recomputation or a cast takes while it runs is left out, and so are reloads for recomputations.
Without the rows of backward memory the bound holds for any plan that recomputes in backward only, however often.
"""

from __future__ import annotations

from .bandwidth_rows import LinkRows
from .columns import MIB, Columns, Terms
from .linear_program import INFINITY, LinearProgram
from .memory_rows import MemoryRows
from .problem import PlanProblem
from .solver import LPSolver
from .state_rows import add_offload_rows, add_reload_rows, add_update_rows

ONCE, ANY_PLAN, RELOADS = "once", "any", "reloads"  # kinds of rows that are added to a program later


class PlanRows:
    """The columns and rows of a problem under a budget; rows of memory are added when a solution breaks them.

    Attributes:
        added: what was added later, in order: its kind, and the position of memory rows.
    """

    def __init__(self, lp: LinearProgram, problem: PlanProblem, budget: int) -> None:
        self.columns = columns = Columns.add(lp, problem)
        self.links = LinkRows.add(lp, columns) if columns.staging is not None else None
        _add_availability_rows(lp, columns)
        _add_tier_row(lp, columns)
        add_offload_rows(lp, columns)
        add_update_rows(lp, columns)
        self._lp = lp
        self.memory = MemoryRows(lp, columns, self.links, budget)
        self.added: list[tuple[str, int]] = []

    def add(self, kind: str, position: int = 0) -> list[int]:
        """Add rows of a kind; return the indices of those for reloads."""
        self.added.append((kind, position))
        if kind == RELOADS:
            return add_reload_rows(self._lp, self.columns)
        (self.memory.add if kind == ONCE else self.memory.add_any_plan)(position)
        return []


class PlanModel:
    """The linear program of a problem under a budget, with its solver."""

    def __init__(self, problem: PlanProblem, budget: int, until: float = INFINITY) -> None:
        self.problem = problem
        self.budget = budget
        self.lp = LPSolver(until)
        self.rows = PlanRows(self.lp, problem, budget)
        self.columns, self.links, self.memory = self.rows.columns, self.rows.links, self.rows.memory

    def add_rows(self, position: int) -> None:
        """Add the rows of memory of a position, of plans that recompute once."""
        self.rows.add(ONCE, position)

    def add_rows_of_any_plan(self, position: int) -> None:
        """Add the rows of memory of a position that hold for any plan."""
        self.rows.add(ANY_PLAN, position)


def _add_availability_rows(lp: LinearProgram, columns: Columns) -> None:
    """Whatever an op reads is available: kept, recomputed or reloaded."""
    problem, recompute = columns.problem, columns.recompute
    for i, storage in enumerate(problem.storages):
        saved, makes_one = columns.saved(i), problem.producers[storage.producer].makes_one
        available = {**saved, recompute[storage.producer]: 1.0}
        is_read = storage.first_backward < problem.size
        if is_read:
            lp.add_row(1.0, 1.0 if makes_one else INFINITY, available)
        else:
            readers = {recompute[w]: 1.0 for w in storage.readers}
            lp.add_row(0.0, INFINITY, {**readers, **dict.fromkeys(saved, -1.0)})
        if not is_read or not makes_one:
            lp.add_row(-INFINITY, 1.0, available if makes_one else saved)
            for w in storage.readers:
                lp.add_row(0.0, INFINITY, {**available, recompute[w]: -1.0})
        if (copied := columns.copied_mib(i)) and columns.staging is not None:
            lp.add_row(0.0, INFINITY, {columns.staging: 1.0, **dict.fromkeys(copied, -1.0)})


def _add_tier_row(lp: LinearProgram, columns: Columns) -> None:
    """The tier holds all that is offloaded."""
    stored: Terms = {column: mib for i in columns.offload for column, mib in columns.copied_mib(i).items()}
    states = zip(columns.state.offload, columns.problem.states, strict=True)
    stored |= {offload: state.nbytes / MIB for offload, state in states}
    capacity = columns.problem.machine.link.capacity / MIB
    if sum(stored.values()) > capacity:
        lp.add_row(-INFINITY, capacity, stored)
