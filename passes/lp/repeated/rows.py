"""Rows of the folded program that hold of all plans: those between two layers, summed over all that one stands for.

    A_1 + R_1 >= W_s  and  A_s + R_s >= W_94,  where s stands for 92     ->   A_1 + R_1 + 92 (A_s + R_s - W_s) >= W_94

What holds of each layer of a plan holds of their sum, and the columns of s are their means.  Rows within a layer are
means as they are, and so are those of bytes.  A row whose other end is not found is left out: that only lowers a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..model import PlanModel
from ..solver import Row
from .problem import FoldedProgram

Place = tuple[int, object]  # of a column: the layer, 0 if it stands for others, -1 and 1 beside it; and what it says
Column = tuple[int | None, object, float]


def sum_rows(model: PlanModel, program: FoldedProgram) -> None:
    """Sum the rows that have not been handed over."""
    places = _places(model, program)
    size, found = program.blocks[0], list[Row]()
    ends: dict[object, dict[int, Row]] = {}
    for row in model.lp.pending_rows:
        at = {places[column][0] for column in row[2] if column in places}
        if 0 in at and len(at) > 1:
            ends.setdefault(_kind(row, places, min(at)), {})[min(at)] = row
        else:
            found.append(row)
    found += (_summed(list(both.values()), places, size) for both in ends.values() if len(both) > 1)
    model.lp.rewrite(found)


def _places(model: PlanModel, program: FoldedProgram) -> dict[int, Place]:
    """The place of each column of the layer that stands for others, and of those beside it."""
    (stands,) = program.stands
    layers = program.layers
    found: dict[int, Place] = {}

    def put(columns: Iterable[tuple[int, object]], maker: int) -> None:
        o = program.chosen[maker]
        if abs(layers.of(o) - stands) <= 1 or layers.of(o) == program.outer - 1:
            at = -1 if layers.of(o) < stands else layers.of(o) - stands
            found.update((column, (at, ((o - layers.first) % layers.period, says))) for column, says in columns)

    for k, made in enumerate(program.producers):
        kept = ((model.keep[i], ("kept", j)) for j, i in enumerate(made.storages))
        put([(model.recompute[k], "again"), *kept], k)
    for column, (says, k) in model.follows.items():
        maker = k if says == "again" else program.storages[k].producer
        which = 0 if says == "again" else program.producers[maker].storages.index(k)
        put([(column, (says, "by now", which))], maker)
    return found


def _kind(row: Row, places: dict[int, Place], first: int) -> object:
    """The same for rows that say the same of other layers."""
    least, most, coefficients = row
    return least, most, frozenset(_column(places.get(c), c, first, value) for c, value in coefficients.items())


def _column(place: Place | None, column: int, first: int, value: float) -> Column:
    return (None, column, value) if place is None else (place[0] - first, place[1], value)


def _summed(ends: Sequence[Row], places: dict[int, Place], size: int) -> Row:
    """The sum of as many rows as there are layers, and one more; over the number of layers."""
    shares = {0: 1.0, -1: 1 / size, 1: 1 / size, None: (size + 1) / size / 2}
    total: dict[int, float] = {}
    for _, _, coefficients in ends:
        for column, value in coefficients.items():
            at = places[column][0] if column in places else None
            total[column] = total.get(column, 0.0) + value * shares[at]
    least, most, _ = ends[0]
    return least * (size + 1) / size, most * (size + 1) / size, total
