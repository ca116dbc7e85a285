"""The rows that say what has to be available, whatever the bytes.

b = gelu(a); g = gelu_backward(d, a); h = mm_backward(g, b)   ->   K_a + R_a >= 1, K_b + R_b >= 1, K_a + R_a >= R_b
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .linear import INFINITY

if TYPE_CHECKING:
    from .model import Model


def available(model: Model) -> None:
    """Need, chain, one form and dominance of every item."""
    row = model.linear.row
    for i, item in enumerate(model.program.items):
        saved = model.saved(i)
        there = {**saved, model.again[item.maker]: 1.0}
        if item.use < model.program.size:
            row(1.0, INFINITY, there)
        else:
            row(0.0, INFINITY, {**{model.again[w]: 1.0 for w in item.readers}, model.kept[i]: -1.0})
        if i in model.away:
            row(-INFINITY, 1.0, saved)
            row(0.0, INFINITY, {model.staged: 1.0, model.away[i]: -1.0})
        for w in item.readers:
            row(0.0, INFINITY, {**there, model.again[w]: -1.0})
