"""From the re-runs that Checkmate found to the plan that carries them out, for the simulator to judge.

    ((15, ("a", "b")),)  ->  Recompute("a", before="s"), Recompute("v", before="s"), Recompute("b", before="s")

Checkmate knows storages; a plan knows values.  So views are recomputed after their storage was, and the getitems
of an op with several results if they are used. This does not depend on how the program was written.
"""

from __future__ import annotations

from passes import Plan, Recompute, Trace

from .checkmate import Reruns
from .step import Step


def replay(trace: Trace, reruns: Reruns) -> Plan:
    """Return the decisions that run the ops of `reruns` again, except those whose results have no use."""
    return _Replay(Step(trace), reruns).plan()


class _Replay:
    """`newest` numbers the copy of each storage that is wanted, `shows` the copy that each value shows."""

    def __init__(self, step: Step, reruns: Reruns) -> None:
        self.step = step
        self.turns: list[tuple[int, str]] = []  # (stage, the op that runs again or "" for the stage's own)
        for stage in step.wants:
            self.turns += [(stage, name) for at, names in reruns if at == stage for name in names]
            self.turns.append((stage, ""))
        self.newest = dict.fromkeys(step.producer, 0)
        self.shows = dict.fromkeys(step.holds, 0)
        self.decisions: list[Recompute] = []

    def plan(self) -> Plan:
        for number, ((stage, name), taken) in enumerate(zip(self.turns, self._taken(), strict=True), 1):
            before = self.step.trace.ops[stage].name
            if not name:
                self._show(self.step.trace.ops[stage].reads, before)
            elif taken:
                self._run(name, taken, number, before)
        return tuple(self.decisions)

    def _taken(self) -> list[set[str]]:
        """Return the storages that each turn makes for a later use."""
        wanted: set[str] = set()
        found: list[set[str]] = []
        for stage, name in reversed(self.turns):
            op = self.step.trace.op[name] if name else self.step.trace.ops[stage]
            made = {made.name for made in op.makes if name and stage not in self.step.pinned.get(made.name, ())}
            found.append(made & wanted)
            wanted -= made
            if found[-1] or not name:
                wanted |= self.step.movable(op.reads)
        return found[::-1]

    def _run(self, name: str, taken: set[str], number: int, before: str) -> None:
        op = self.step.trace.op[name]
        self._show(op.reads, before)
        self.decisions.append(Recompute(name, before))
        self.newest |= dict.fromkeys(taken, number)
        self.shows[name] = number
        for part in self.step.getitems.get(name, ()) if len(op.makes) > 1 else ():
            if taken.issuperset(self.step.holds[part]):
                self.decisions.append(Recompute(part, before))
                self.shows[part] = number

    def _show(self, values: tuple[str, ...], before: str) -> None:
        """Make `values` show the newest copies."""
        for value in values:
            newest = {self.newest[s] for s in self.step.holds.get(value, ())}
            if newest - {self.shows.get(value)}:
                op = self.step.trace.op[value]
                assert not op.makes and len(newest) == 1, f"{value} has to be run again, and was not"
                self._show(op.reads, before)
                self.decisions.append(Recompute(value, before))
                self.shows[value] = newest.pop()
