"""The planner's linear program: which storages stay, which are made again, which go away and come back, which live far.

Symbols.  t: a position; F: the first backward one.  s: an item of m_s bytes, made by p(s), read in forward by makers
W(s), last at f_s, and in backward first at b_s.  If backward never reads it, s is *indirect*: re-runs alone do, at g_s
at the earliest, and if any, by h_s; where it is not, g_s = h_s = b_s.  o, w: makers that take c_o microseconds.
base(t): bytes that are there whatever is decided, if nothing lives far.  B: the budget.  r: a resident of n_r bytes,
which may live far; its visits k = 0, 1, ..., stretches of ops that read it, begin at v_rk; rest(r): the positions
without a visit, of which k-1 and k have those of rest(r, k) between them; a gradient d that leaves is done with at l_d.

    K_s  s stays through its gap            R_o   o runs again in backward, once, when it is first needed
    O_s  s goes away and comes back         Q_ot  o has run again before t
    C_s  the same, cast for its way         V_st  s is there at t, kept or made again
    A_s = K_s + O_s + C_s                   L_s = m_s O_s + n_s C_s, its bytes on the way; n_s once it is cast
    X_r  r lives far                        N_rk  r stays from visit k-1 to visit k
    D_j, G_j  bytes that have left by the end of stage j of forward, and gradients that have by that of one of backward
    P_j  bytes that have come back by the end of stage j: for backward; in forward and on, those of fetches as well
    M_rk = n_r (X_r - N_rk), N_r0 = 0       y_t   gradients that have left by t
    q_s, r_s, h_r  microseconds that compute loses to one copy of s as it is, as cast, of r
          (`Link.overhead_us`); H_r: to
          all copies of r outside of the update: h_r X_r for one that leaves, sum of h_r (X_r - N_rk) over its visits
    e_j  microseconds more than its length that stage j takes      w  microseconds that compute waits in all
    x_s, y_s  microseconds of the casts of s, out and back         z  anything is copied: copies need their staging
    E_t  bytes that have come back before they are wanted          G_st  s has come back for a re-run before t
    v    the update is run in windows, which need theirs           u  microseconds more than its own that each takes
    g_t  the last update before t, or one before that, is run in windows; it is not said of t at which one stands
    f_u  of what update u reads, the share that goes through windows that are there before and behind it (`ahead`)

    minimise  sum c_o R_o + sum 2 q_s O_s + sum (x_s + y_s + 2 r_s) C_s + sum H_r + w_forward + w_backward + u

    need        A_s + R_p(s) >= 1                            s that backward reads         rows.available
    chain       A_s + R_p(s) >= R_w                          w in W(s)                     rows.available
    one form    A_s + R_p(s) <= 1                            s that is all p(s) makes      rows.available
                A_s <= 1                                     other s                       rows.available
                O_s + C_s <= z                                                             rows.available
    capacity    sum of L_s + sum of n_r X_r <= what the far tier takes                     rows.fits_there
    dominance   A_s <= sum of R_w over W(s)                  indirect s                    rows.available
    home        N_rk <= X_r;  X_r <= z                       r that is fetched, or leaves  far.living
    update      u >= (1 - f_u) sum of n_r X_r / rates - its own time                       far.updating
                v >= X_r;  v <= sum of X_r                   r that it reads               far.updating
                H_s <= X_s;  u >= sum of n_s H_s / stepping - its own time; n_s H_s is not on the links
                T_s >= what is far of s less all of it H_s;  T_s >= H_s of what is not     far.updating
                g_t >= v of the last update before t;  g_t >= g of that update             far.updating
    out         D_j <= D_j-1 + rate (length_j + e_j),  D_j <= sum of L_s, f_s before the end of j        links.out
                G_j <= G_j-1 + rate (length_j + e_j),  G_j <= sum of n_d X_d, l_d before the end of j    links.home
    back        P_j <= P_j-1 + rate (length_j + e_j),  P_j >= sum of L_s, h_s up to the end of j,
                                                                and of M_rk, v_rk up to it  links.fetch, links.back
    time        sum of e_j over forward <= w_forward + sum q_s O_s + sum (x_s + r_s) C_s + H_r of forward          links
                sum of e_j over backward <= w_backward + sum q_s O_s + sum (y_s + r_s) C_s + sum c_o R_o
                                                                + H_r of backward + u of updates in it        links
    turns       the time of forward, with what is added to it on the right of `time`, >= all that it carries, by the
                rates of the links; so of backward; where the tier carries one way at a time            links.turns
    forward t   base(t) + sum of m_s K_s + L_s over f_s < t - D_j(t) + rest ... <= B       memory.forward
    backward t  base(t) + sum of m_s V_st over gaps + rest ... <= B                        memory.backward
                what no plan does without at t + rest ... <= B                             memory.anyhow
    rest ...    E_t + z staging - sum of n_r X_r over t in rest(r) + n_r N_rk over t in rest(r, k) - y_t
                + v (window - workspace) in the update + g_t ahead + what o draws (R_o - Q_ot), from o on         memory
    left        y_t <= G_j(t);  y_t <= sum of n_d X_d over l_d < t                         memory
    early       E_t >= P_j(t)-1 - sum of L_s over g_s <= t - sum of M_rk over v_rk <= t - sum of m_s G_st        memory
    again by t  Q_ot <= R_o;  Q_ot >= 1 - A_s, s of o, b_s <= t;  Q_ot >= Q_wt - A_s       memory.ran_again
                Q_ot >= R_o, t behind all that may want o                                  memory.ran_again
    there at t  V_st >= Q_wt;  G_st <= V_st, O_s + C_s       s that backward reads         memory.direct
                V_st >= K_s + Q_p(s)t                        the same, all p(s) makes      memory.direct
                V_st >= K_s, Q_p(s)t - O_s - C_s             the same, one of several      memory.direct
                V_st >= K_s + Q_p(s)t - Q_wt                 indirect s with one reader    memory.indirect
                V_st >= (R_w - Q_wt) - (R_p(s) - Q_p(s)t) - O_s - C_s    the same with several     memory.indirect
                V_st >= K_s + R_w - 1 - Q_wt                 the same, one of several      memory.indirect

Every plan of the class satisfies all rows: forward and backward run in the trace's order; an op runs again at most
once, in backward, when it is first needed; an item is kept through its gap, away, or made again, and is then there
until backward last reads it; copies out end with forward, and those of gradients with backward; what backward visits is
fetched in backward, once for each visit unless it stays; links are fluid, and carry on while compute does something
else.  What a re-run or a cast holds while it runs is left out, and so are fetches for re-runs.  So the least objective
is a lower bound on the time that a plan of the class adds.  Without the rows of `memory.backward` it is one on the time
that any plan adds that recomputes in backward only, however often.
"""

from __future__ import annotations

from .bandwidth_rows import LinkRows
from .problem import PlanProblem
from .rows import MIB, TIE, add_availability_rows, add_tier_room_rows
from .solver import INFINITY, LPSolver
from .state_rows import StateColumns, add_offload_rows, add_update_rows

# Ops.  In longer steps the rows of a position leave out what has run again by then, if at all.  The least objective is
# no lower without them, and it saves up to two thirds of the time there.  Below it saves little, and the points of the
# program that has them happen to be rounded better (ViT decomposed at 30 %: a gap of 0.2 in place of 1.3 %).
LONG = 5_500


class PlanModel:
    """The columns of a program under a budget, and the rows that have been written so far."""

    def __init__(self, program: PlanProblem, budget: int, until: float = INFINITY) -> None:
        machine = program.machine
        self.problem = program
        self.budget = budget
        self.lp = LPSolver(until)
        self.keep = [self.lp.add_column(least=float(self._stays(i))) for i in range(len(program.storages))]
        self.recompute = [self.lp.add_column(maker.us, most=float(not maker.runs_once)) for maker in program.producers]
        self.offload = {
            i: self.lp.add_column(2 * machine.link.overhead_us(item.nbytes) + TIE * item.nbytes / MIB)
            for i, item in enumerate(program.storages)
            if item.can_offload
        }
        self.cast_offload = {
            i: self.lp.add_column(
                machine.cast.us(item.nbytes)
                + 2 * machine.link.overhead_us(item.wire_nbytes)
                + TIE * item.wire_nbytes / MIB
            )
            for i, item in enumerate(program.storages)
            if item.wire_nbytes
        }
        self.state = StateColumns.of(self)
        self.staging = self.lp.add_column() if self.offload or self.state.offload else -1
        self.links = LinkRows.of(self) if self.offload or self.state.offload else None
        add_availability_rows(self)
        add_tier_room_rows(self)
        add_offload_rows(self)
        add_update_rows(self)
        self.last_reruns = program.last_reruns if program.size > LONG else (program.size,) * len(program.producers)
        self.position_rows: set[int] = set()  # positions that have rows
        self.any_plan_rows: set[int] = set()  # backward positions that have rows of what no plan does without
        self.follows: dict[int, tuple[str, int]] = {}  # see `memory`: what has run again, what is there

    @property
    def integer_columns(self) -> list[int]:
        """The columns that a plan makes 0 or 1; the others follow."""
        return [*self.keep, *self.offload.values(), *self.cast_offload.values(), *self.state.offload]

    def saved(self, item: int) -> dict[int, float]:
        """A_s as coefficients."""
        return {self.keep[item]: 1.0, **dict.fromkeys(self.copied_mib(item), 1.0)}

    def copied_mib(self, item: int) -> dict[int, float]:
        """L_s as coefficients, in MiB; none, if s may not leave."""
        columns = (
            (self.offload, self.problem.storages[item].nbytes),
            (self.cast_offload, self.problem.storages[item].wire_nbytes),
        )
        return {column[item]: nbytes / MIB for column, nbytes in columns if item in column}

    @property
    def tie_us(self) -> float:
        """The most that ties add to the objective."""
        moved = sum(self.problem.storages[i].nbytes for i in self.offload) + sum(r.nbytes for r in self.problem.states)
        return TIE * moved / MIB

    def _stays(self, i: int) -> bool:
        item = self.problem.storages[i]
        return (
            self.problem.producers[item.producer].runs_once
            and not item.can_offload
            and item.first_backward < self.problem.size
        )
