"""What is in the way of a budget, in words: the op, the bytes there, the source lines, and what would help.

1500 bytes are allowed; the smallest budget for which a plan was found is 2150.
It needs most at b (gelu, layers.0 model.py:8); on cpu lie there: ...
"""

from __future__ import annotations

import numpy as np

from .forecast import Forecast
from .gaps import Gaps
from .machine import Machine
from .program import Program
from .trace import Trace

TOP = 8  # of what is in the way, so many are named
LOSSES = ("log_softmax", "cross_entropy", "nll_loss", "logsumexp")
HELP = {
    "parameter": "fewer or smaller parameters, e.g. a smaller dtype",
    "buffer": "fewer or smaller buffers",
    "state": "an optimizer that keeps less, e.g. SGD or Adafactor",
    "gradient": "fewer parameters that require a gradient",
}
SMALLER = "a smaller batch (the same batch in several parts, whose gradients add up)"


def obstacle(forecast: Forecast, machine: Machine, captured: Trace) -> str:
    """What was wanted, what is, where, and what to do."""
    op = forecast.trace.ops[forecast.at]
    lines = [
        f"{machine.budget} bytes are allowed; the smallest budget for which a plan was found is {forecast.peak}.",
        f"It needs most at {op.name} ({', '.join(filter(None, (op.fn, op.where)))}); on {machine.device} lie there:",
    ]
    there = forecast.alive(forecast.at)
    for life in there[:TOP]:
        maker = forecast.trace.op[life.maker]
        lines.append(f"  {life.nbytes:>14} bytes  {life.kind:<10} {life.storage} {maker.type} {maker.where}".rstrip())
    rest = forecast.peak - op.workspace - sum(life.nbytes for life in there[:TOP])
    lines.append(f"  {rest:>14} bytes  in {max(0, len(there) - TOP)} smaller tensors and the staging of copies")
    if op.workspace:
        lines.append(f"  {op.workspace:>14} bytes  workspace  of {op.name} itself")
    return "\n".join([*lines, *_floor(captured, machine), f"Give budget={forecast.peak}, or {_help(forecast)}."])


def _floor(captured: Trace, machine: Machine) -> list[str]:
    """What must lie there at the same time whatever is decided, if that alone is over the budget; state need not, where
    it may live far."""
    program = Program(Gaps(captured), machine)
    floor = program.floor
    if machine.homes or not len(floor) or (least := int(floor.max())) <= machine.budget:
        return []
    op = captured.ops[int(np.argmax(floor))]
    return [f"No plan can do with less than {least} bytes: so many are in use at {op.name} at the same time."]


def _help(forecast: Forecast) -> str:
    """The levers that lower what lies there most."""
    index = forecast.at
    op = forecast.trace.ops[index]
    most = max(forecast.by_kind, key=lambda kind: int(forecast.by_kind[kind][index]))
    levers = [HELP.get(most, SMALLER)]
    if any(name in op.fn for name in LOSSES):
        levers.append("a loss that is computed in chunks")
    return " or ".join(levers)
