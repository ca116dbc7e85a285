"""The rows that say what has to be available, whatever the bytes.

b = gelu(a); g = gelu_backward(d, a); h = mm_backward(g, b)   ->   K_a + R_a = 1, K_b + R_b = 1
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
