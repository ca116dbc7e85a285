"""The rows that say what fits at a position.

    position 812 (backward)   ->   base + 4.0 V_relu,812 + 8.0 K_mm + ... <= budget, and the rows of V and Q

They are written for a position when it is found to be violated: a few dozen of thousands are enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..ir.arrays import Floats
from .rows import MIB
from .solver import INFINITY

if TYPE_CHECKING:
    from .model import PlanModel

Terms = dict[int, float]


def add_forward_row(model: PlanModel, position: int) -> None:
    """What lies there at a forward position: items that forward has done with stay, or have not left yet."""
    row = _Row(model)
    for i in map(int, np.flatnonzero(model.problem.last_forward < position)):
        row.add(model.keep[i], model.problem.storages[i].nbytes / MIB)
        if i in model.offload:
            for column, nbytes in model.copied_mib(i).items():
                row.add(column, nbytes)
    if model.links and (left := model.links.offloaded_by(position)) is not None:
        row.add(left, -1.0)
    _add_states(model, position, row, {})
    _add_moving(model, position, row, Terms())
    row.write(position, model.problem.fixed)


def add_backward_rows(model: PlanModel, position: int) -> None:
    """What lies there at a backward position: items that are kept or were made again, and those that came back."""
    row = _Row(model)
    again, came = ran_again(model, position), Terms()
    for i in map(
        int, np.flatnonzero((model.problem.last_forward < position) & (model.problem.first_backward > position))
    ):
        item = model.problem.storages[i]
        there = (
            direct(model, i, again, came)
            if item.first_backward < model.problem.size
            else indirect(model, i, again, position)
        )
        for column, share in there.items():
            row.add(column, share * item.nbytes / MIB)
    _add_states(model, position, row, again)
    _add_moving(model, position, row, came)
    row.write(position, model.problem.fixed)


def add_any_plan_row(model: PlanModel, position: int) -> None:
    """What lies there at a backward position in any plan: what is used there, and what came back before it is."""
    row = _Row(model)
    _add_moving(model, position, row, Terms())
    row.write(position, model.problem.in_use)


def _add_states(model: PlanModel, position: int, row: _Row, again: dict[int, int]) -> None:
    """The generator's states with which ops drew that will run again."""
    for o, draws, first in model.problem.rng_draws:
        if first <= position:
            row.add(model.recompute[o], draws / MIB)
            if o in again:
                row.add(again[o], -draws / MIB)


def _add_moving(model: PlanModel, position: int, row: _Row, came: Terms) -> None:
    """What came back before it is used, and gradients that have left."""
    if model.links and (come := model.links.reloaded_before(position)) is not None:
        row.add(_early(model, position, come, came), 1.0)
    if (left := _left(model, position)) is not None:
        row.add(left, -1.0)


def _early(model: PlanModel, position: int, come: int, came: Terms) -> int:
    """E_t: what has come back and is not wanted yet; what is, is part of the base or counted in `came`."""
    column = model.lp.add_column(most=INFINITY)
    least = {column: 1.0, come: -1.0, **came}
    for i in model.offload:
        if reload_deadline(model, i) <= position:
            least |= model.copied_mib(i)
    least |= model.state.reloaded_mib(model, lambda first: first <= position)
    model.lp.add_row(0.0, INFINITY, least)
    return column


def _left(model: PlanModel, position: int) -> int | None:
    """What has left of the gradients that are done with; None, if none is."""
    done = model.state.offloaded_mib(model, position)
    if not done or not model.links:
        return None
    column = model.lp.add_column(most=INFINITY)
    model.lp.add_row(0.0, INFINITY, {column: -1.0, **done})
    if (by := model.links.backward_out.by(position)) is not None:
        model.lp.add_row(0.0, INFINITY, {column: -1.0, by: 1.0})
    return column


def reload_deadline(model: PlanModel, i: int) -> int:
    """From where on an item that came back is no longer among the bytes that did: it is part of the base, or, if only
    re-runs read it, may be gone."""
    item = model.problem.storages[i]
    return item.first_backward if item.first_backward < model.problem.size else model.problem.wanted[0][i]


def ran_again(model: PlanModel, position: int) -> dict[int, int]:
    """Q_ot of the makers that can have run again by a position; R_o, where that says the same."""
    program, linear = model.problem, model.lp
    wanted = program.wanted[1]
    again = {
        o: model.recompute[o]
        for o, maker in enumerate(program.producers)
        if wanted[o] <= position and not maker.runs_once
    }
    for o in reversed([o for o in again if model.last_reruns[o] > position]):
        made = program.producers[o].storages
        used = [i for i in made if program.storages[i].first_backward <= position]
        if used and len(made) == 1:
            continue
        again[o] = column = linear.add_column()
        model.follows[column] = "again", o
        linear.add_row(0.0, INFINITY, {model.recompute[o]: 1.0, column: -1.0})
        # R_o does not say that o has run by now: of its items the one that is used so far may be saved.
        for i in used:
            linear.add_row(1.0, INFINITY, {column: 1.0, **model.saved(i)})
        for i in made:
            for w in program.storages[i].readers:
                if w in again:
                    linear.add_row(0.0, INFINITY, {column: 1.0, **model.saved(i), again[w]: -1.0})
    return again


def direct(model: PlanModel, i: int, again: dict[int, int], came: Terms) -> Terms:
    """V_st of an item that backward has yet to read: K_s, and whether it has been made again or come back for a re-run;
    `came` takes the bytes of those that came back."""
    item, kept = model.problem.storages[i], model.keep[i]
    made = again.get(item.producer)
    read = [again[w] for w in item.readers if w in again]
    alone = model.problem.producers[item.producer].makes_one
    if made is None and not read:
        return {kept: 1.0}
    if made is not None and alone and i not in model.offload:
        return {kept: 1.0, made: 1.0}  # what readers that have run again need is one of the two
    column, row, sent = model.lp.add_column(), model.lp.add_row, dict.fromkeys(model.copied_mib(i), 1.0)
    model.follows[column] = "there", i
    for least in read:
        row(0.0, INFINITY, {column: 1.0, least: -1.0})
    if made is None or not alone:
        row(0.0, INFINITY, {column: 1.0, kept: -1.0})
    if made is not None and alone:
        row(0.0, INFINITY, {column: 1.0, made: -1.0, kept: -1.0})
    elif made is not None:
        row(0.0, INFINITY, {column: 1.0, made: -1.0, **sent})
    if read and sent:
        back = model.lp.add_column()
        row(0.0, INFINITY, {column: 1.0, back: -1.0})
        row(0.0, INFINITY, {**sent, back: -1.0})
        came[back] = item.nbytes / MIB
    return {column: 1.0}


def indirect(model: PlanModel, i: int, again: dict[int, int], position: int) -> Terms:
    """V_st of an item that only re-runs read: it is there until the last of them."""
    item, kept = model.problem.storages[i], model.keep[i]
    if all(w not in again for w in item.readers):
        return {kept: 1.0} if item.readers else {}
    if all(model.last_reruns[w] <= position for w in item.readers):
        return {}  # whoever wants it has run again
    alone = model.problem.producers[item.producer].makes_one
    made = again.get(item.producer) if alone else None
    column, row = model.lp.add_column(), model.lp.add_row
    model.follows[column] = "there", i
    if len(item.readers) == 1:
        there = {kept: -1.0} if made is None else {kept: -1.0, made: -1.0}
        row(0.0, INFINITY, {column: 1.0, **there, again[item.readers[0]]: 1.0})
        return {column: 1.0}
    makes, sent = model.recompute[item.producer], dict.fromkeys(model.copied_mib(i), 1.0)
    later = {} if made == makes else {makes: 1.0} if made is None else {makes: 1.0, made: -1.0}
    for w in item.readers:
        wanted, last = model.recompute[w], again.get(w)
        if last != wanted:
            wants = {wanted: -1.0} if last is None else {wanted: -1.0, last: 1.0}
            if alone:
                row(0.0, INFINITY, {column: 1.0, **wants, **later, **sent})
            else:
                row(-1.0, INFINITY, {column: 1.0, kept: -1.0, **wants})
    return {column: 1.0}


class _Row:
    """A memory row that is being written."""

    def __init__(self, model: PlanModel) -> None:
        self.model = model
        self.coefficients: dict[int, float] = {}
        if model.links:
            self.add(model.staging, model.problem.machine.link.staging / MIB)

    def add(self, column: int, nbytes: float) -> None:
        self.coefficients[column] = self.coefficients.get(column, 0.0) + nbytes

    def write(self, position: int, there: Floats) -> None:
        """Write it, for a position at which `there` has the bytes that nobody decides about."""
        for column, nbytes in self.model.state.device_mib(self.model, position).items():
            self.add(column, nbytes)
        room = float(self.model.budget - there[position]) / MIB
        self.model.lp.add_row(-INFINITY, room, self.coefficients)
