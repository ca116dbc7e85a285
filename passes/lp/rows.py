"""The rows that say what has to be available, whatever the bytes.

b = gelu(a); g = gelu_backward(d, a); h = mm_backward(g, b)   ->   K_a + R_a = 1, K_b + R_b = 1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .solver import INFINITY

if TYPE_CHECKING:
    from .model import PlanModel

MIB = float(1 << 20)
TIE = 1e-4  # microseconds per MiB: of two plans that take the same time, the one that moves less


def add_availability_rows(model: PlanModel) -> None:
    """Need, chain, one form and dominance of every item."""
    row = model.linear.row
    for i, item in enumerate(model.program.items):
        saved, alone = model.saved(i), model.program.makers[item.maker].alone
        there = {**saved, model.again[item.maker]: 1.0}
        is_direct = item.use < model.program.size
        if is_direct:
            row(1.0, 1.0 if alone else INFINITY, there)
        else:
            row(0.0, INFINITY, {**{model.again[w]: 1.0 for w in item.readers}, **dict.fromkeys(saved, -1.0)})
        if not is_direct or not alone:
            row(-INFINITY, 1.0, there if alone else saved)
            for w in item.readers:
                row(0.0, INFINITY, {**there, model.again[w]: -1.0})
        if sent := model.sent(i):
            row(0.0, INFINITY, {model.staged: 1.0, **dict.fromkeys(sent, -1.0)})


def add_tier_room_rows(model: PlanModel) -> None:
    """The far tier takes what goes away and what lives there."""
    stored = {column: mib for i in model.away for column, mib in model.sent(i).items()}
    homes = zip(model.far.lives, model.program.residents, strict=True)
    stored |= {lives: resident.nbytes / MIB for lives, resident in homes}
    capacity = model.program.machine.link.capacity / MIB
    if sum(stored.values()) > capacity:
        model.linear.row(-INFINITY, capacity, stored)
