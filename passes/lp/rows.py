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
    row = model.lp.add_row
    for i, item in enumerate(model.problem.storages):
        saved, alone = model.saved(i), model.problem.producers[item.producer].makes_one
        there = {**saved, model.recompute[item.producer]: 1.0}
        is_direct = item.first_backward < model.problem.size
        if is_direct:
            row(1.0, 1.0 if alone else INFINITY, there)
        else:
            row(0.0, INFINITY, {**{model.recompute[w]: 1.0 for w in item.readers}, **dict.fromkeys(saved, -1.0)})
        if not is_direct or not alone:
            row(-INFINITY, 1.0, there if alone else saved)
            for w in item.readers:
                row(0.0, INFINITY, {**there, model.recompute[w]: -1.0})
        if sent := model.copied_mib(i):
            row(0.0, INFINITY, {model.staging: 1.0, **dict.fromkeys(sent, -1.0)})


def add_tier_room_rows(model: PlanModel) -> None:
    """The far tier takes what goes away and what lives there."""
    stored = {column: mib for i in model.offload for column, mib in model.copied_mib(i).items()}
    homes = zip(model.state.offload, model.problem.states, strict=True)
    stored |= {lives: resident.nbytes / MIB for lives, resident in homes}
    capacity = model.problem.machine.link.capacity / MIB
    if sum(stored.values()) > capacity:
        model.lp.add_row(-INFINITY, capacity, stored)
