"""Why the peak of a step is where it is, in a sentence.

forecast   ->   the peak is at op 286 of 603, in backward of head (aten._log_softmax_backward_data.default): it makes
                8.2 MB beside 29.0 MB that are still needed, most of it activation (20.4 MB)
"""

from __future__ import annotations

from collections import Counter

from passes import Forecast

from .tables import mb


def peak_sentence(forecast: Forecast) -> str:
    """Return the op of the peak, the bytes that it makes and takes, and those that others still need."""
    at = forecast.peak_index
    op, ops = forecast.trace.ops[at], len(forecast.trace.ops)
    where = op.where.partition(" ")[0]
    path = "" if ":" in where else where  # else it is a line of a file alone
    place = " ".join(filter(None, (f"of {path}" if path else "", f"({op.fn})")))
    made, others = 0, Counter[str]()
    for life in forecast.live_at(at):
        if life.producer == op.name:
            made += life.nbytes
        else:
            others[life.kind] += life.nbytes
    workspace = int(forecast.by_kind["workspace"][at])
    parts = [f"makes {mb(made)}"] * (made > 0) + [f"takes {mb(workspace)} of workspace"] * (workspace > 0)
    own = f"it {' and '.join(parts)} beside" if parts else "it runs beside"
    rest = others.total()
    most = f", most of it {others.most_common(1)[0][0]} ({mb(others.most_common(1)[0][1])})" if len(others) > 1 else ""
    return f"the peak is at op {at + 1} of {ops}, in {op.phase} {place}: {own} {mb(rest)} that are still needed{most}"
