"""The text of a step with the optimizer's states among its inputs, and with its update.

Before:                          After:
    w = parameter()                  optimizer_state = state()
    ...                              w = parameter()
    return gradient dw               ...
                                     optimizer_step = AdamW.step(optimizer_state, dw, w)
                                     return gradient dw

    w_update = update(w, dw)         w_update = AdamW.step(optimizer_state, w, dw)

How many bytes these are, and how long an update takes, is found by a trial of the optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, fx

from passes import Op, Storage, Trace
from passes.ir.liveness import RELEASED
from passes.order.early_updates import update_early

from ..graph.captured import Captured, Input, Output
from ..graph.nodes import returned_values
from .optimizer_profiler import OptimizerProfiler, kinds_of, may_be_stepped, stepped_parameters, update_nbytes
from .state_parts import StatePart, TrainedParameters

STATE = "optimizer_state"  # what is of one part of the states has the part's number behind it


def add_update(
    trace: Trace, optimizer: torch.optim.Optimizer, trained: TrainedParameters, owned: Mapping[Tensor, Sequence[str]],
    window: int = 1 << 62,
) -> Trace:  # fmt: skip
    """The trace with the optimizer's states among its inputs and its update as its last op.

    All that is trained has a gradient then.  Each part of the states, which may live in the far tier, is a value of its
    own.  Where ops in backward update, a part is of one parameter, and no more than a window of one is stepped on to
    find the time of its update.
    `owned` are the values of each parameter: its bytes, and its gradient.
    """
    if trained.updates:
        return _with_updates(trace, optimizer, trained.parts, trained.updates, window)
    nbytes, workspace = update_nbytes(optimizer, trained.parameters)
    whose = [[value for p in part.parameters for value in owned.get(p, ())] for part in trained.parts]
    sizes = [part.nbytes for part in trained.parts]
    return add_update_op(trace, type(optimizer).__name__, nbytes, workspace, sizes, whose)


def add_update_op(
    trace: Trace, name: str, nbytes: int, workspace: int, sizes: Sequence[int] = (), whose: Sequence[Sequence[str]] = ()
) -> Trace:
    """The trace with states of so many bytes in all, `sizes` of them in parts of their own, and with an update that
    takes so much workspace.  It reads behind each part the values `whose` the states are."""
    states = [_state(f"{STATE}_{i}", size, name, f"u8[{size}]") for i, size in enumerate(sizes)]
    states.append(_state(STATE, nbytes - sum(sizes), name))  # without a type it can't be streamed
    gradients = dict.fromkeys(value for kind, value in trace.outputs if kind not in ("output", RELEASED))
    parameters = (op.name for op in trace.ops if op.fn == "parameter")
    owned = [*whose, *([()] * (len(states) - len(whose)))]
    reads = dict.fromkeys(read for state, values in zip(states, owned, strict=True) for read in (state.name, *values))
    reads |= dict.fromkeys((*gradients, *parameters))
    update = Op("optimizer_step", f"{name}.step", tuple(reads), phase="update", workspace=workspace)
    return replace(trace, ops=(*states, *trace.ops, update))


def price_update(trace: Trace, optimizer: torch.optim.Optimizer, trained: Collection[Tensor], window: int) -> Trace:
    """The trace with the time of the update that is its last op, as it is in windows of so many bytes."""
    trial, sure = OptimizerProfiler(optimizer), set(map(id, trained))
    rows = [[p for p in group["params"] if id(p) in sure] for group in optimizer.param_groups]
    us = round(sum(trial.us(kind, window) for kind in kinds_of(rows)), 1)
    return replace(trace, ops=(*trace.ops[:-1], replace(trace.ops[-1], us=us)))


def _with_updates(
    trace: Trace, optimizer: torch.optim.Optimizer, parts: Sequence[StatePart], inside: Mapping[str, Tensor],
    window: int,
) -> Trace:  # fmt: skip
    """The trace in which each update in backward reads the states of its own parameter, and only those that are not
    `inside`, and may have a gradient from elsewhere, wait for the end."""
    trial, name = OptimizerProfiler(optimizer), type(optimizer).__name__
    rows = stepped_parameters(optimizer)
    kinds = dict(zip(chain.from_iterable(rows), kinds_of(rows), strict=True))
    works = {p: trial.run(kind) for p, kind in kinds.items()}
    sizes = {p: part.nbytes for part in parts for p in part.parameters}
    states = {p: _state(f"{STATE}_{i}", size, name, f"u8[{size}]") for i, (p, size) in enumerate(sizes.items())}
    rest = _state(STATE, sum(trial.states[kind] for kind in kinds.values()) - sum(sizes.values()), name)

    def stepping(op: Op) -> Op:
        if op.name not in inside:
            return op
        p = inside[op.name]
        reads, us = (states.get(p, rest).name, *op.reads), trial.us(kinds[p], window)
        return replace(op, fn=f"{name}.step", reads=reads, workspace=works[p], us=us)

    ops = (*states.values(), rest, *map(stepping, trace.ops))
    done = set(inside.values())
    late = [[p for p in row if p not in done and may_be_stepped(p)] for row in rows]
    if any(late):
        reads = (rest.name, *(value for kind, value in trace.outputs if kind not in ("output", RELEASED)))
        workspace = trial.workspace(late, frozenset())
        ops = (*ops, Op("optimizer_step", f"{name}.step", reads, phase="update", workspace=workspace))
    return update_early(replace(trace, ops=ops))


def _state(name: str, nbytes: int, where: str, type: str = "") -> Op:
    return Op(name, "state", makes=(Storage(name, nbytes),), holds=(name,), type=type, where=where)


def parameter_values(graph: fx.Graph, captured: Captured, named: Mapping[str, Tensor]) -> dict[Tensor, tuple[str, ...]]:
    """The names of the values of each parameter, in a graph of the captured step; `named` are the module's."""
    inputs = zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=False)
    outputs = zip(returned_values(graph), captured.outputs, strict=True)
    roles: list[tuple[fx.Node, Input | Output]] = [*inputs, *outputs]
    found: dict[Tensor, tuple[str, ...]] = {}
    for node, role in roles:
        if role.kind in ("parameter", "gradient") and role.name in named:
            found[named[role.name]] = (*found.get(named[role.name], ()), str(node.name))
    return found
