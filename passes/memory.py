"""The rows that say what fits at a position.

    position 812 (backward)   ->   base + 4.0 V_relu,812 + 8.0 K_mm + ... <= budget, and the rows of V and Q

They are written for a position when it is found to be violated: a few dozen of thousands are enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .linear import INFINITY

if TYPE_CHECKING:
    from .model import Model

MIB = float(1 << 20)


def forward(model: Model, position: int) -> None:
    """What lies there at a forward position: items that forward has done with stay, or have not left yet."""
    row = _Row(model)
    for i in np.flatnonzero(model.program.left < position):
        for column in model.saved(int(i)):
            row.add(column, model.program.items[i].nbytes / MIB)
    if model.links:
        row.add(model.links.leaving(position), -1.0)
    row.write(position)


def backward(model: Model, position: int, first: int = 0) -> None:
    """What lies there at a backward position: items that are kept or were made again, and those that came back.

    Makers before `first` count as not having run again, which leaves the row valid, and much shorter.
    """
    row = _Row(model)
    again = ran_again(model, position, first)
    for i in map(int, np.flatnonzero((model.program.left < position) & (model.program.use > position))):
        item = model.program.items[i]
        if item.use < model.program.size:
            column: int | None = direct(model, i, again)
        else:
            column = indirect(model, i, again) if all(w >= first for w in item.readers) else None
        if column is not None:
            row.add(column, model.program.items[i].nbytes / MIB)
    if model.links and (come := model.links.coming(position)) is not None:
        row.add(come, 1.0)
        for i, column in model.away.items():
            if model.program.items[i].use <= position:
                row.add(column, -model.program.items[i].nbytes / MIB)
    row.write(position)


def ran_again(model: Model, position: int, first: int) -> dict[int, int]:
    """Q_ot of the makers from `first` on that can have run again by a position; R_o, where that says the same."""
    program, linear = model.program, model.linear
    again: dict[int, int] = {}
    for o in reversed(range(first, len(program.makers))):
        made = program.makers[o].items
        if program.makers[o].once:
            continue
        used = [i for i in made if program.items[i].use <= position]
        if used and len(made) == 1:
            again[o] = model.again[o]
            continue
        read = [(i, w) for i in made for w in program.items[i].readers if w in again]
        if used or read:
            again[o] = column = linear.column()
            linear.row(0.0, INFINITY, {model.again[o]: 1.0, column: -1.0})
            # R_o does not say that o has run by now: of its items the one that is used so far may be saved.
            for i in used:
                linear.row(1.0, INFINITY, {column: 1.0, **model.saved(i)})
            for i, w in read:
                linear.row(0.0, INFINITY, {column: 1.0, **model.saved(i), again[w]: -1.0})
    return again


def direct(model: Model, i: int, again: dict[int, int]) -> int | None:
    """V_st of an item that backward has yet to read: K_s itself, if nothing can have made it again."""
    item, kept = model.program.items[i], model.kept[i]
    made = again.get(item.maker)
    read = [again[w] for w in item.readers if w in again]
    if made is None and not read:
        return kept
    column = model.linear.column()
    for least in (kept, *read):
        model.linear.row(0.0, INFINITY, {column: 1.0, least: -1.0})
    if made is not None:
        came = {model.away[i]: 1.0} if i in model.away else {}
        model.linear.row(0.0, INFINITY, {column: 1.0, made: -1.0, **came})
    return column


def indirect(model: Model, i: int, again: dict[int, int]) -> int | None:
    """V_st of an item that only re-runs read: it is there until the last of them."""
    item, kept = model.program.items[i], model.kept[i]
    if not item.readers:
        return None
    if all(w not in again for w in item.readers):
        return kept
    column, row = model.linear.column(), model.linear.row
    if len(item.readers) == 1:
        ran = again[item.readers[0]]
        row(0.0, INFINITY, {column: 1.0, kept: -1.0, ran: 1.0})
        made = again.get(item.maker)
        if made is not None and len(model.program.makers[item.maker].items) == 1:
            row(0.0, INFINITY, {column: 1.0, made: -1.0, ran: 1.0})
        return column
    for w in item.readers:
        wanted, last = model.again[w], again.get(w)
        if last != wanted:
            ran_by_now = {last: 1.0} if last is not None else {}
            row(-1.0, INFINITY, {column: 1.0, kept: -1.0, wanted: -1.0, **ran_by_now})
    return column


class _Row:
    """A memory row that is being written."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.coefficients: dict[int, float] = {}
        if model.away:
            self.add(model.staged, model.program.machine.staging / MIB)

    def add(self, column: int, nbytes: float) -> None:
        self.coefficients[column] = self.coefficients.get(column, 0.0) + nbytes

    def write(self, position: int) -> None:
        self.model.linear.row(-INFINITY, self.model.room(position), self.coefficients)
