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
class StateRows:
    """X of every resident; N of every rest between two visits; v, u and g of every update; H of every part of the
    states that the host may update, and T of what the links take for what belongs to it."""

    lives: tuple[int, ...]
    stays: dict[tuple[int, int], int]
    windows: dict[int, int]
    longer: dict[int, int]
    hosted: dict[str, tuple[int, int]]  # by the states' value
    ahead: dict[int, int]

    @classmethod
    def of(cls, model: PlanModel) -> StateRows:
        """The columns."""
        program, column = model.program, model.linear.column
        tolls = [program.machine.link.overhead_us(resident.nbytes) for resident in program.residents]
        lives = tuple(
            column(toll * len(resident.visits) + TIE * resident.nbytes / MIB)
            for toll, resident in zip(tolls, program.residents, strict=True)
        )
        stays = {
            (h, rest.visit): column(-tolls[h])
            for h, resident in enumerate(program.residents)
            for rest in resident.rests(program.size)
            if rest.visit is not None
        }
        updates = program.updates if lives else ()
        longer = {position: column(1.0, most=INFINITY) for position in updates}
        windows = {position: column() for position in updates}
        ahead = {position: column() for position in updates} if program.machine.streaming.update_staging else {}
        return cls(lives, stays, windows, longer, _hosted(model) if lives else {}, ahead)

    def there(self, model: PlanModel, position: int) -> Terms:
        """Bytes in MiB beyond those of the captured step."""
        terms = Terms()
        for h, resident in enumerate(model.program.residents):
            for rest in resident.rests(model.program.size):
                if rest.first <= position < rest.last and not resident.made:
                    terms[self.lives[h]] = -resident.nbytes / MIB
                    if rest.visit is not None:
                        terms[self.stays[h, rest.visit]] = resident.nbytes / MIB
        before = max((update for update in self.ahead if update < position), default=-1)
        if before >= 0 and position not in self.windows:
            terms[self.ahead[before]] = model.program.machine.streaming.update_staging / MIB
        if position in self.windows:
            workspace = model.program.gaps.trace.ops[position].workspace
            terms[self.windows[position]] = (model.program.machine.streaming.window - workspace) / MIB
        return terms

    def fetched(self, model: PlanModel, when: Callable[[int], bool]) -> Terms:
        """What is fetched for visits whose first position satisfies `when`, in MiB."""
        terms = Terms()
        for h, resident in enumerate(model.program.residents):
            for k, (first, _) in enumerate(resident.visits if not resident.made else ()):
                if when(first):
                    terms[self.lives[h]] = terms.get(self.lives[h], 0.0) + resident.nbytes / MIB
                    if k:
                        terms[self.stays[h, k]] = -resident.nbytes / MIB
        return terms

    def busy(self, model: PlanModel) -> tuple[Terms, Terms]:
        """What compute has to do in forward and in backward that it has not if all is at home, in microseconds: copies
        take their toll, and updates in backward longer."""
        early, late = Terms(), {u: 1.0 for position, u in self.longer.items() if position < model.program.end}
        for h, resident in enumerate(model.program.residents):
            toll = model.program.machine.link.overhead_us(resident.nbytes)
            for k, (first, _) in enumerate(resident.visits):
                phase = early if first < model.program.boundary else late
                phase[self.lives[h]] = phase.get(self.lives[h], 0.0) + toll
                if k:
                    phase[self.stays[h, k]] = -toll
        return early, late

    def left(self, model: PlanModel, position: int) -> Terms:
        """The gradients that are done with before a position, in MiB."""
        return {
            self.lives[h]: resident.nbytes / MIB
            for h, resident in enumerate(model.program.residents)
            if resident.made and resident.visits[-1][1] < position
        }

    def updated(self, model: PlanModel) -> Terms:
        """How long the links take for updates in backward, in microseconds."""
        program, terms = model.program, Terms()
        places = range(program.boundary, program.end)
        inside = [program.gaps.trace.ops[position] for position in self.windows if position in places]
        read = {value for op in inside for value in op.reads}
        for lives, resident in zip(self.lives, program.residents, strict=True):
            if resident.value in read:
                terms[lives] = resident.update_us(program.machine)
        return terms


def add_residency_rows(model: PlanModel) -> None:
    """What is there between two visits lives far; copies take their staging."""
    row, far = model.linear.row, model.far
    for (h, _), stays in far.stays.items():
        row(0.0, INFINITY, {far.lives[h]: 1.0, stays: -1.0})
    for h, resident in enumerate(model.program.residents):
        if resident.moves:
            row(0.0, INFINITY, {model.staged: 1.0, far.lives[h]: -1.0})


def add_update_rows(model: PlanModel) -> None:
    """How much longer than its own time each update takes for what it fetches and sends, and whether in windows."""
    program, row, far = model.program, model.linear.row, model.far
    for position, window in far.windows.items():
        op, us = program.gaps.trace.ops[position], Terms()
        rest = 1.0 - staged_share(program.gaps.trace, op, program.machine)
        for lives, resident in zip(far.lives, program.residents, strict=True):
            if resident.value in op.reads:
                us[lives] = -rest * resident.update_us(program.machine)
                row(0.0, INFINITY, {window: 1.0, lives: -1.0})
        row(-INFINITY, 0.0, {window: 1.0, **dict.fromkeys(us, -1.0)})
        steps = _hosting(model, position, us)
        row(-op.us, INFINITY, {far.longer[position]: 1.0, **us})
        if steps:
            row(-op.us, INFINITY, {far.longer[position]: 1.0, **steps})
    for before, position in pairwise([-1, *far.ahead]):
        row(0.0, INFINITY, {far.ahead[position]: 1.0, far.windows[position]: -1.0})
        if before >= 0:
            row(0.0, INFINITY, {far.ahead[position]: 1.0, far.ahead[before]: -1.0})


def _hosted(model: PlanModel) -> dict[str, tuple[int, int]]:
    """H, and T in microseconds, of each part of the states that may live far."""
    program, column = model.program, model.linear.column
    if not program.machine.streaming.host_update_rate:
        return {}
    values = {resident.value for resident in program.residents}
    states = (part.states.name for position in program.updates for part in _parts(model, position))
    return {value: (column(), column(most=INFINITY)) for value in states if value in values}


def _parts(model: PlanModel, position: int) -> Iterator[StateGroup]:
    trace = model.program.gaps.trace
    return state_groups(trace, trace.ops[position])


def _hosting(model: PlanModel, position: int, us: Terms) -> Terms:
    """What the links take less for what the host updates is put into `us`; what the host takes is returned.

    Of what belongs to a part the links take T: at least that of what is far, less all of it if the host updates the
    part; and at least that of what is here, if it does.
    """
    program, row, steps = model.program, model.linear.row, Terms()
    lives = {resident.storage: x for x, resident in zip(model.far.lives, program.residents, strict=True)}
    for part in _parts(model, position):
        if part.states.name not in model.far.hosted:
            continue
        is_hosted, trips = model.far.hosted[part.states.name]
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
