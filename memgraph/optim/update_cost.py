"""Add the optimizer's states and its update to the text of a step.

Before:                          After:
    w = parameter()                  optimizer_state = state()
    ...                              w = parameter()
    return gradient dw               ...
                                     optimizer_step = AdamW.step(optimizer_state, dw, w)
                                     return gradient dw

    w_update = update(w, dw)         w_update = AdamW.step(optimizer_state, w, dw)

Bytes and times come from the optimizer's profiler.
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
from ..profile.memory_meter import resident_bytes
from ..tensors.parameter_groups import option_tensors
from .optimizer_profiler import OptimizerProfiler, update_nbytes, update_us
from .parameter_kind import kinds_of, may_be_stepped, stepped_parameters
from .trained_parameters import Owner, TrainedParameters

STATE = "optimizer_state"  # the value of those that stay on the device


def parameter_values(graph: fx.Graph, captured: Captured, named: Mapping[str, Tensor]) -> dict[Owner, tuple[str, ...]]:
    """Map each parameter of the module to its values and those of its gradient in the trace: one, or one a block."""
    inputs = zip(graph.find_nodes(op="placeholder"), captured.graph_inputs, strict=False)
    outputs = zip(returned_values(graph), captured.graph_outputs, strict=True)
    roles: list[tuple[fx.Node, Input | Output]] = [*inputs, *outputs]
    values: dict[Owner, tuple[str, ...]] = {}
    for node, role in roles:
        if role.kind in ("parameter", "gradient") and role.name in named:
            parameter = named[role.name]
            values[parameter] = (*values.get(parameter, ()), str(node.name))
    return values


def add_update(
    trace: Trace, optimizer: torch.optim.Optimizer, trained: TrainedParameters, values: Mapping[Owner, Sequence[str]],
    window: int = 1 << 62,
) -> Trace:  # fmt: skip
    """Return the trace with the optimizer's states among its inputs and its update as its last op.

    All that is trained has a gradient then. Where ops in backward update, no more than a window of a parameter is
    stepped on to measure the time of its update. `values` are those of each parameter: its bytes, and its gradient.
    """
    if trained.updates:
        return _with_updates(trace, optimizer, trained.states, trained.updates, window)
    nbytes, workspace = update_nbytes(optimizer, trained.parameters)
    own = [values.get(owner, ()) for owner in trained.states]
    return add_update_op(trace, type(optimizer).__name__, nbytes, workspace, [*trained.states.values()], own)


def add_update_op(
    trace: Trace, name: str, nbytes: int, workspace: int, sizes: Sequence[int] = (),
    own_values: Sequence[Sequence[str]] = (),
) -> Trace:  # fmt: skip
    """Return the trace with states of so many bytes in all, each of `sizes` a value, and an update that reads them.

    After each it reads the values of the same owner.
    """
    states = [_state(state_value(i), size, name, f"u8[{size}]") for i, size in enumerate(sizes)]
    states.append(_state(STATE, nbytes - sum(sizes), name))  # without a type it can't be streamed
    gradients = dict.fromkeys(value for kind, value in trace.outputs if kind not in ("output", RELEASED))
    parameters = (op.name for op in trace.ops if op.fn == "parameter")
    values = [*own_values, *([()] * (len(states) - len(own_values)))]
    reads = dict.fromkeys(read for state, own in zip(states, values, strict=True) for read in (state.name, *own))
    reads |= dict.fromkeys((*gradients, *parameters))
    update = Op("optimizer_step", f"{name}.step", tuple(reads), phase="update", workspace=workspace)
    return replace(trace, ops=(*states, *trace.ops, update))


def price_update(trace: Trace, optimizer: torch.optim.Optimizer, trained: Collection[Tensor], window: int) -> Trace:
    """Return the trace with the time of the update that is its last op, measured in windows of so many bytes."""
    us = update_us(optimizer, trained, window)
    return replace(trace, ops=(*trace.ops[:-1], replace(trace.ops[-1], us=us)))


def with_windows(trace: Trace, window: int) -> Trace:
    """Return the trace whose updates count a window of so many bytes, whatever of their state is offloaded."""
    ops = (replace(op, workspace=max(op.workspace, window)) if op.phase == "update" else op for op in trace.ops)
    return replace(trace, ops=tuple(ops))


def _with_updates(
    trace: Trace, optimizer: torch.optim.Optimizer, sizes: Mapping[Owner, int], updates: Mapping[str, Tensor],
    window: int,
) -> Trace:  # fmt: skip
    """Let each update in backward read the states of its parameter.

    Only parameters without such an update, which may have a gradient from elsewhere, are updated at the end.
    """
    profiler, name = OptimizerProfiler(optimizer), type(optimizer).__name__
    rows = stepped_parameters(optimizer)
    kinds = dict(zip(chain.from_iterable(rows), kinds_of(rows), strict=True))
    workspaces = {p: profiler.update_workspace(kind) for p, kind in kinds.items()}
    states = {p: _state(state_value(i), size, name, f"u8[{size}]") for i, (p, size) in enumerate(sizes.items())}
    every = sum(profiler.states[kind] for kind in kinds.values()) + resident_bytes(option_tensors(optimizer))
    rest = _state(STATE, every - sum(sizes.values()), name)

    def with_states(op: Op) -> Op:
        if op.name not in updates:
            return op
        p = updates[op.name]
        reads, us = (states.get(p, rest).name, *op.reads), profiler.update_us(kinds[p], window)
        return replace(op, fn=f"{name}.step", reads=reads, workspace=workspaces[p], us=us)

    ops = (*states.values(), rest, *map(with_states, trace.ops))
    updated = set(updates.values())
    late = [[p for p in row if p not in updated and may_be_stepped(p)] for row in rows]
    if any(late):
        reads = (rest.name, *(value for kind, value in trace.outputs if kind not in ("output", RELEASED)))
        workspace = profiler.workspace(late, frozenset())
        ops = (*ops, Op("optimizer_step", f"{name}.step", reads, phase="update", workspace=workspace))
    return update_early(replace(trace, ops=ops))


def state_value(number: int) -> str:
    """Return the name of the trace value of a state, by the number of its owner among those whose states may go."""
    return f"{STATE}_{number}"


def _state(name: str, nbytes: int, where: str, type: str = "") -> Op:
    return Op(name, "state", makes=(Storage(name, nbytes),), holds=(name,), type=type, where=where)
