"""Rows for what a re-run holds while it runs, which the rows of positions leave out.

    softmax runs again before g, over the budget by 55 MiB   ->   2.0 K_a + 8.0 K_b + ... + 55.0 R_softmax <= room

They say of the step as it was simulated what would have to change, and are wrong of steps that look different: good for
finding a plan that fits, and no part of any proof.
"""

from __future__ import annotations

from .forecast import Forecast
from .linear import INFINITY
from .model import MIB, Model


def event(model: Model, forecast: Forecast, index: int, position: int) -> int:
    """Write that what is there at op `index` of the simulated step, before `position` of the captured one, has to
    fit; the row."""
    items = {item.storage: i for i, item in enumerate(model.program.items)}
    coefficients: dict[int, float] = {}
    held = 0
    for life in forecast.alive(index):
        made = forecast.trace.op[life.maker]
        again = made.again
        i = items.get(again + life.storage.removeprefix(made.name) if again else life.storage)
        if i is None or not (again or _waits(model, i, position)):
            continue
        held += life.nbytes
        item = model.program.items[i]
        for column in (model.kept[i], *([model.again[item.maker]] if again else [])):
            coefficients[column] = coefficients.get(column, 0.0) + life.nbytes / MIB
    fixed = float(forecast.total[index]) - held
    return model.linear.row(-INFINITY, (model.budget - fixed) / MIB, coefficients)


def _waits(model: Model, i: int, position: int) -> bool:
    """Whether an item that is there is in its gap, so that it might as well not be there."""
    item = model.program.items[i]
    return item.left < position <= item.use
