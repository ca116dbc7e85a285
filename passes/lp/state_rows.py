"""The rows of what of the state lives far: where it is, what of it comes and goes, and what the update takes.

w, 2 MB, is far, read by ops 5 and 90   ->   - 2.0 X_w at all positions but 5 and 90, + 2.0 N_w at 6-89
s, 4 MB, is updated on the host         ->   H_s <= X_s; the links are without s, but not without w if that is here
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ..analysis.host_update import StateGroup, device_us, host_us, state_groups
from ..simulate.forecast import staged_share
from .rows import MIB, TIE
from .solver import INFINITY

if TYPE_CHECKING:
    from .model import PlanModel

Terms = dict[int, float]


@dataclass(frozen=True)
class StateColumns:
    """X of every resident; N of every rest between two visits; v, u and g of every update; H of every part of the
    states that the host may update, and T of what the links take for what belongs to it."""

    offload: tuple[int, ...]
    stay: dict[tuple[int, int], int]
    windowed: dict[int, int]
    extra_us: dict[int, int]
    host_updates: dict[str, tuple[int, int]]  # by the states' value
    staged: dict[int, int]

    @classmethod
    def of(cls, model: PlanModel) -> StateColumns:
        """The columns."""
        program, column = model.problem, model.lp.add_column
        tolls = [program.machine.link.overhead_us(resident.nbytes) for resident in program.states]
        lives = tuple(
            column(toll * len(resident.uses) + TIE * resident.nbytes / MIB)
            for toll, resident in zip(tolls, program.states, strict=True)
        )
        stays = {
            (h, rest.next_use): column(-tolls[h])
            for h, resident in enumerate(program.states)
            for rest in resident.gaps(program.size)
            if rest.next_use is not None
        }
        updates = program.update_positions if lives else ()
        longer = {position: column(1.0, most=INFINITY) for position in updates}
        windows = {position: column() for position in updates}
        ahead = {position: column() for position in updates} if program.machine.streaming.update_staging else {}
        return cls(lives, stays, windows, longer, _hosted(model) if lives else {}, ahead)

    def device_mib(self, model: PlanModel, position: int) -> Terms:
        """Bytes in MiB beyond those of the captured step."""
        terms = Terms()
        for h, resident in enumerate(model.problem.states):
            for rest in resident.gaps(model.problem.size):
                if rest.first <= position < rest.last and not resident.is_gradient:
                    terms[self.offload[h]] = -resident.nbytes / MIB
                    if rest.next_use is not None:
                        terms[self.stay[h, rest.next_use]] = resident.nbytes / MIB
        before = max((update for update in self.staged if update < position), default=-1)
        if before >= 0 and position not in self.windowed:
            terms[self.staged[before]] = model.problem.machine.streaming.update_staging / MIB
        if position in self.windowed:
            workspace = model.problem.gaps.trace.ops[position].workspace
            terms[self.windowed[position]] = (model.problem.machine.streaming.window - workspace) / MIB
        return terms

    def reloaded_mib(self, model: PlanModel, when: Callable[[int], bool]) -> Terms:
        """What is fetched for visits whose first position satisfies `when`, in MiB."""
        terms = Terms()
        for h, resident in enumerate(model.problem.states):
            for k, (first, _) in enumerate(resident.uses if not resident.is_gradient else ()):
                if when(first):
                    terms[self.offload[h]] = terms.get(self.offload[h], 0.0) + resident.nbytes / MIB
                    if k:
                        terms[self.stay[h, k]] = -resident.nbytes / MIB
        return terms

    def compute_us(self, model: PlanModel) -> tuple[Terms, Terms]:
        """What compute has to do in forward and in backward that it has not if all is at home, in microseconds: copies
        take their toll, and updates in backward longer."""
        early, late = Terms(), {u: 1.0 for position, u in self.extra_us.items() if position < model.problem.copies_end}
        for h, resident in enumerate(model.problem.states):
            toll = model.problem.machine.link.overhead_us(resident.nbytes)
            for k, (first, _) in enumerate(resident.uses):
                phase = early if first < model.problem.boundary else late
                phase[self.offload[h]] = phase.get(self.offload[h], 0.0) + toll
                if k:
                    phase[self.stay[h, k]] = -toll
        return early, late

    def offloaded_mib(self, model: PlanModel, position: int) -> Terms:
        """The gradients that are done with before a position, in MiB."""
        return {
            self.offload[h]: resident.nbytes / MIB
            for h, resident in enumerate(model.problem.states)
            if resident.is_gradient and resident.uses[-1][1] < position
        }

    def update_us(self, model: PlanModel) -> Terms:
        """How long the links take for updates in backward, in microseconds."""
        program, terms = model.problem, Terms()
        places = range(program.boundary, program.copies_end)
        inside = [program.gaps.trace.ops[position] for position in self.windowed if position in places]
        read = {value for op in inside for value in op.reads}
        for lives, resident in zip(self.offload, program.states, strict=True):
            if resident.value in read:
                terms[lives] = resident.update_us(program.machine)
        return terms


def add_offload_rows(model: PlanModel) -> None:
    """What is there between two visits lives far; copies take their staging."""
    row, far = model.lp.add_row, model.state
    for (h, _), stays in far.stay.items():
        row(0.0, INFINITY, {far.offload[h]: 1.0, stays: -1.0})
    for h, resident in enumerate(model.problem.states):
        if resident.is_copied:
            row(0.0, INFINITY, {model.staging: 1.0, far.offload[h]: -1.0})


def add_update_rows(model: PlanModel) -> None:
    """How much longer than its own time each update takes for what it fetches and sends, and whether in windows."""
    program, row, far = model.problem, model.lp.add_row, model.state
    for position, window in far.windowed.items():
        op, us = program.gaps.trace.ops[position], Terms()
        rest = 1.0 - staged_share(program.gaps.trace, op, program.machine)
        for lives, resident in zip(far.offload, program.states, strict=True):
            if resident.value in op.reads:
                us[lives] = -rest * resident.update_us(program.machine)
                row(0.0, INFINITY, {window: 1.0, lives: -1.0})
        row(-INFINITY, 0.0, {window: 1.0, **dict.fromkeys(us, -1.0)})
        steps = _hosting(model, position, us)
        row(-op.us, INFINITY, {far.extra_us[position]: 1.0, **us})
        if steps:
            row(-op.us, INFINITY, {far.extra_us[position]: 1.0, **steps})
    for before, position in pairwise([-1, *far.staged]):
        row(0.0, INFINITY, {far.staged[position]: 1.0, far.windowed[position]: -1.0})
        if before >= 0:
            row(0.0, INFINITY, {far.staged[position]: 1.0, far.staged[before]: -1.0})


def _hosted(model: PlanModel) -> dict[str, tuple[int, int]]:
    """H, and T in microseconds, of each part of the states that may live far."""
    program, column = model.problem, model.lp.add_column
    if not program.machine.streaming.host_update_rate:
        return {}
    values = {resident.value for resident in program.states}
    states = (part.states.name for position in program.update_positions for part in _parts(model, position))
    return {value: (column(), column(most=INFINITY)) for value in states if value in values}


def _parts(model: PlanModel, position: int) -> Iterator[StateGroup]:
    trace = model.problem.gaps.trace
    return state_groups(trace, trace.ops[position])


def _hosting(model: PlanModel, position: int, us: Terms) -> Terms:
    """What the links take less for what the host updates is put into `us`; what the host takes is returned.

    Of what belongs to a part the links take T: at least that of what is far, less all of it if the host updates the
    part; and at least that of what is here, if it does.
    """
    program, row, steps = model.problem, model.lp.add_row, Terms()
    lives = {resident.storage: x for x, resident in zip(model.state.offload, program.states, strict=True)}
    for part in _parts(model, position):
        if part.states.name not in model.state.host_updates:
            continue
        is_hosted, trips = model.state.host_updates[part.states.name]
        there, here = Terms(), {is_hosted: 0.0}
        for op in part.owned:
            here[is_hosted] -= host_us(op, program.machine)
            for x in (lives[held] for held in op.holds if held in lives):
                there[x], here[x] = us.pop(x, 0.0), host_us(op, program.machine)
        row(0.0, INFINITY, {trips: 1.0, is_hosted: -sum(there.values()), **there})
        row(0.0, INFINITY, {trips: 1.0, **here})
        row(0.0, INFINITY, {lives[part.states.holds[0]]: 1.0, is_hosted: -1.0})
        us[is_hosted], us[trips] = device_us(part.states, program.machine), -1.0
        steps[is_hosted] = -part.host_us(program.machine)
    return steps
