"""The planner's linear program: which storages stay, which are made again, which go away and come back.

Symbols.  t: a position; F: the first backward one.  s: an item of m_s bytes, made by p(s), read in forward by makers
W(s), last at f_s, and in backward first at b_s (never: s is *indirect*).  o, w: makers that take c_o microseconds.
base(t): bytes that are there whatever is decided.  B: the budget.

    K_s  s stays through its gap            R_o   o runs again in backward, once, when it is first needed
    O_s  s goes away and comes back         Q_ot  o has run again before t
    A_s = K_s + O_s                         V_st  s is there at t, kept or made again
    D_j, P_j  bytes that have left by the end of forward stage j, that have come back by the end of backward stage j
    w_j  microseconds that compute waits in stage j         z  anything goes away, so that copies need their staging

    minimise  sum c_o R_o + sum w_j

    need        A_s + R_p(s) >= 1                            s that backward reads         rows.available
    chain       A_s + R_p(s) >= R_w                          w in W(s)                     rows.available
    one form    A_s <= 1,  O_s <= z                                                        rows.available
    dominance   K_s <= sum of R_w over W(s)                  indirect s                    rows.available
    out         D_j <= D_j-1 + rate (length_j + w_j),  D_j <= sum of m_s O_s, f_s in stages up to j      links.out
    back        P_j <= P_j-1 + rate (length_j + w_j),  P_j >= sum of m_s O_s, b_s in stages up to j      links.back
    forward t   base(t) + sum of m_s (K_s + O_s) over f_s < t - D_j(t) + z staging <= B    memory.forward
    backward t  base(t) + sum of m_s V_st over gaps + P_j(t)-1 - sum of m_s O_s over b_s <= t
                + z staging <= B                                                           memory.backward
    again by t  Q_ot <= R_o;  Q_ot >= 1 - A_s, s of o, b_s <= t;  Q_ot >= Q_wt - A_s       memory.ran_again
    there at t  V_st >= K_s, Q_wt, Q_p(s)t - O_s             s that backward reads         memory.direct
                V_st >= K_s - Q_wt, Q_p(s)t - Q_wt           indirect s with one reader    memory.indirect
                V_st >= K_s + R_w - 1 - Q_wt                 indirect s with several       memory.indirect

Every plan of the class satisfies all rows: forward and backward run in the trace's order; an op runs again at most
once, in backward; an item is kept through its gap, away, or made again, and is then there until backward last reads it;
copies out end with forward; links are fluid.  What a re-run takes while it runs is left out.  So the least objective is
a lower bound on the time that a plan of the class adds.  Without the backward rows it is one on the time that any plan
adds that recomputes in backward only, however often.
"""

from __future__ import annotations

from .linear import Linear
from .links import Links
from .program import Program
from .rows import available

MIB = float(1 << 20)
TIE = 1e-4  # microseconds per MiB: of two plans that take the same time, the one that moves less


class Model:
    """The columns of a program under a budget, and the rows that have been written so far."""

    def __init__(self, program: Program, budget: int) -> None:
        self.program = program
        self.budget = budget
        self.linear = Linear()
        self.kept = [self.linear.column(least=float(self._stays(i))) for i in range(len(program.items))]
        self.again = [self.linear.column(maker.us, most=float(not maker.once)) for maker in program.makers]
        self.away = {
            i: self.linear.column(TIE * item.nbytes / MIB) for i, item in enumerate(program.items) if item.leaves
        }
        self.staged = self.linear.column() if self.away else -1
        self.links = Links.of(program, self.linear, self.away) if self.away else None
        available(self)
        self.windows: dict[int, int] = {}  # of each position that has rows: at how many makers they look

    @property
    def whole(self) -> list[int]:
        """The columns that a plan makes 0 or 1; the others follow."""
        return [*self.kept, *self.away.values()]

    def saved(self, item: int) -> dict[int, float]:
        """A_s as coefficients."""
        found = {self.kept[item]: 1.0}
        if item in self.away:
            found[self.away[item]] = 1.0
        return found

    @property
    def tie(self) -> float:
        """The most that ties add to the objective."""
        return sum(self.linear.costs[column] for column in self.away.values())

    def room(self, position: int) -> float:
        """What the budget leaves to the items at a position, in MiB."""
        return float(self.budget - self.program.base[position]) / MIB

    def _stays(self, i: int) -> bool:
        item = self.program.items[i]
        return self.program.makers[item.maker].once and not item.leaves and item.use < self.program.size
