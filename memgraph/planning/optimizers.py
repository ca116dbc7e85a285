"""The kinds of optimizers, and the changes that each makes to a planned step; chosen once per module.

optimizer=AdamW(...)     ->   CountedOptimizer    its states are inputs of the step, its update is the last op
fuse_update=True         ->   FusedOptimizer      each parameter is updated in backward
optimizer=OSS(...)       ->   ShardedOptimizer    gradients are reduced in backward, parameters gathered in forward
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, fx, nn, optim

from passes import Machine, Streaming, Trace
from passes.slices.whole_weight import Reason

from ..errors import ShardError
from ..graph.captured import Captured
from ..graph.fuse_updates import add_updates
from ..optim.fused_update import FusedUpdate
from ..optim.offloaded_update import OffloadedUpdate
from ..optim.trained_parameters import TrainedParameters, movable_states
from ..optim.update_cost import add_update, parameter_values, price_update
from ..options.compile_options import CompileOptions
from ..oss import OSS
from ..oss.compiled.insert_all_gather import forward_buckets, insert_all_gathers
from ..oss.compiled.insert_reduce_scatter import insert_reduce_scatters
from ..oss.compiled.joint_planning import announcing_failure
from ..oss.compiled.step_memory import add_sharded_update, movable_shard_states, offloaded_nbytes
from ..runtime.measure_update import UpdateMeasurement
from ..tensors.loss_outputs import OutputSelector, select_scalars_only
from .optimizer_state import OptimizerState
from .ranks import JointRanks, Ranks


class CountedOptimizer(OptimizerState):
    """An optimizer that steps after backward."""

    optimizer: optim.Optimizer

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer, update: OffloadedUpdate) -> None:
        super().__init__(module, update)
        self.optimizer = optimizer  # pyright: ignore[reportIncompatibleVariableOverride] # never None

    def key(self) -> tuple[Hashable, ...]:
        groups = tuple(tuple(map(id, group["params"])) for group in self.optimizer.param_groups)
        return (
            *super().key(),
            *groups,
            tuple(id(p) for p in self.optimizer.state if isinstance(p, Tensor) and not p.requires_grad),
        )

    def trained(self, captured: Captured) -> TrainedParameters:
        return TrainedParameters(self._with_gradients(captured), movable_states(self.optimizer), captured=captured)

    def add_update(self, trace: Trace, graph: fx.Graph, trained: TrainedParameters) -> Trace:
        named = dict(self.module.named_parameters())
        values = parameter_values(graph, trained.captured, named) if trained.captured and not trained.updates else {}
        return add_update(trace, self.optimizer, trained, values, self.update.window)

    def price_update(self, trace: Trace, machine: Machine, trained: TrainedParameters) -> Trace:
        if not (machine.link.half_duplex and machine.streaming.enabled) or trained.updates:
            return trace
        return price_update(trace, self.optimizer, trained.parameters, self.update.window)


class FusedOptimizer(CountedOptimizer):
    """An optimizer whose updates run in backward."""

    keeps_captures = False
    whole_reason = Reason.FUSED

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer, update: OffloadedUpdate) -> None:
        super().__init__(module, optimizer, update)
        self.fused_update = FusedUpdate(module, optimizer, update)

    def outputs(self, outputs: OutputSelector) -> OutputSelector:
        return select_scalars_only

    def insert_ops(self, captured: Captured, trained: TrainedParameters) -> tuple[Captured, TrainedParameters]:
        if not captured.differentiable:
            return captured, trained
        captured, updates = add_updates(captured, self.module, self.optimizer)
        return captured, replace(trained, updates=updates)


class ShardedOptimizer(OptimizerState):
    """An optimizer whose states are sharded over ranks."""

    keeps_captures = False
    whole_reason = Reason.SHARDED
    sharded: OSS

    def __init__(self, module: nn.Module, optimizer: OSS) -> None:
        super().__init__(module, optimizer.offloaded_shards)
        self.optimizer = self.sharded = optimizer  # pyright: ignore[reportIncompatibleVariableOverride] # never None
        self.sharded_grads, self.pending_gathers = optimizer.sharded_grads, optimizer.pending_gathers
        self.has_other_ranks = not optimizer.comm.is_alone

    def refuse(self, owned_nbytes: int, budget: float) -> None:
        """A sharded optimizer is checked when it is made."""

    def announcing_failure(self) -> AbstractContextManager[None]:
        return announcing_failure(self.sharded, self.module.parameters())

    def before_capture(self) -> None:
        super().before_capture()
        if self.wrapper.averages and not self.sharded.sharded_grads.replicated:
            raise ShardError(
                "a wrapper such as DistributedDataParallel averages the gradients of this module over the ranks, as "
                'does its sharded optimizer: make that with OSS(..., gradients="same"), or leave the wrapper out'
            )
        self.sharded.pending_gathers.gather_for_capture(self.module.parameters())

    def key(self) -> tuple[Hashable, ...]:
        groups = tuple(tuple(map(id, group["params"])) for group in self.sharded.param_groups)
        return (
            *super().key(),
            *groups,
            self.sharded.pending_gathers.frozen_buckets,
            self.sharded.sharded_step.frozen_with_state,
        )

    def trained(self, captured: Captured) -> TrainedParameters:
        self.sharded.refresh_views()
        return TrainedParameters(self._with_gradients(captured), movable_shard_states(self.sharded), captured=captured)

    def insert_ops(self, captured: Captured, trained: TrainedParameters) -> tuple[Captured, TrainedParameters]:
        """Reduce gradients over ranks in backward, and gather parameters in forward."""
        named = dict(self.module.named_parameters())
        captured = insert_reduce_scatters(captured, self.sharded.sharded_grads.grad_buckets(named))
        if trained.parameters:
            captured = insert_all_gathers(captured, forward_buckets(self.sharded, named))
        buckets = frozenset(role.index for role in captured.outputs if role.kind == "shard")
        return captured, replace(trained, shards=buckets, gathers=captured.gathers)

    def ranks(self, trained: TrainedParameters, device: torch.device) -> Ranks:
        if self.sharded.comm.is_alone or not trained.parameters:
            return Ranks()
        return JointRanks(self.sharded, device, bool(trained.shards or trained.gathers))

    def add_update(self, trace: Trace, graph: fx.Graph, trained: TrainedParameters) -> Trace:
        return add_sharded_update(trace, self.sharded, trained)

    def held_parameters(self) -> frozenset[str]:
        """No parameter is offloaded."""
        return frozenset()

    def _with_windows(self, machine: Machine, trained: TrainedParameters) -> Machine:
        window = offloaded_nbytes(self.sharded, trained.shards)
        return replace(machine, streaming=Streaming(True, only_states=True, window=window))


def optimizer_state(module: nn.Module, options: CompileOptions, device: torch.device) -> OptimizerState:
    """Return what the optimizer of the options changes about steps of a module."""
    optimizer = options.optimizer
    update = OffloadedUpdate(optimizer, options.fuse_update, host_update=options.host_update)
    if optimizer is None:
        return OptimizerState(module, update)
    if options.fuse_update:
        return FusedOptimizer(module, optimizer, update)
    state: OptimizerState
    if isinstance(optimizer, OSS):
        state = ShardedOptimizer(module, optimizer)
    else:
        state = CountedOptimizer(module, optimizer, update)
    state.on_measured = UpdateMeasurement(optimizer, device)
    return state
