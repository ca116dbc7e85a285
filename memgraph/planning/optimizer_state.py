"""The changes that an optimizer makes to a planned step; here for a module without one.

a captured step   ->   what it trains, the ops that are inserted, the states that its trace counts
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, fx, nn, optim

from passes import Machine, Streaming, Trace
from passes.slices.whole_weight import Reason

from ..errors import UpdateError
from ..graph.captured import Captured
from ..guards.wrappers import OuterWrapper
from ..optim.fused_update import FusedUpdate
from ..optim.offloaded_update import OffloadedUpdate
from ..optim.placement import Location, StatePlacement
from ..optim.trained_parameters import TrainedParameters
from ..oss import OSS, PendingGathers, ShardedGradients
from ..profile.memory_meter import resident_bytes
from ..runtime.concurrent_runs import concurrent_runs
from ..runtime.step import Step
from ..storage.mapped_storage import is_offloaded
from ..tensors.aliasing import describe_shared_memory, held_elsewhere
from ..tensors.gradients import existing_gradients
from ..tensors.loss_outputs import OutputSelector
from ..tensors.parameter_groups import parameter_groups, state_tensors
from .accumulated_step import with_remaining_grads, with_resident
from .ranks import Ranks

WRAPPER, KEPT = "wrapper", "kept_attributes"  # the names of what these hold in a trace


class OptimizerState:
    """No optimizer; the subclasses in `optimizers.py` override what their kind changes.

    Attributes:
        placement: which parameters, gradients and states are offloaded.
        update: the update whose states may be offloaded.
        keeps_captures: a capture can be used again for the same call with gradients to add to.
        has_other_ranks: the optimizer is shared with other processes.
        wrapper: what trains the module over ranks.
        whole_reason: the reason why no weight comes in blocks of rows; None if there is none.
        on_measured: called when the bytes of a step were measured.
    """

    optimizer: optim.Optimizer | None = None
    fused_update: FusedUpdate | None = None
    sharded: OSS | None = None
    sharded_grads: ShardedGradients | None = None
    pending_gathers: PendingGathers | None = None
    keeps_captures = True
    has_other_ranks = False
    whole_reason: Reason | None = None

    def __init__(self, module: nn.Module, update: OffloadedUpdate) -> None:
        self.module, self.update, self.placement = module, update, StatePlacement(module)
        self.wrapper = OuterWrapper(module)
        self.on_measured: Callable[[Step], None] = lambda step: None

    @property
    def updated_ids(self) -> set[int]:
        """The ids of the parameters that the optimizer has now."""
        return set(map(id, parameter_groups(self.optimizer)))

    def move_to(self, location: Location) -> None:
        """Offload to other places from now on."""
        self.placement.location = self.update.location = location

    def refuse(self, owned_nbytes: int, budget: float) -> None:
        """
        Raises:
            UpdateError: no step with this optimizer can be planned.
        """
        self.update.check_fits_on_device(owned_nbytes, budget)

    def announcing_failure(self) -> AbstractContextManager[None]:
        """Tell the other ranks about an error before they wait for this one."""
        return nullcontext()

    def before_capture(self) -> None:
        """Make parameters readable.

        Raises:
            ShardError: two would average gradients over ranks.
        """

    def refuse_parameters(self, parameters: Sequence[Tensor]) -> None:
        """
        Raises:
            UpdateError: all parameters that the module has now are new to the optimizer.
        """
        if self.optimizer is not None and self.updated_ids.isdisjoint(map(id, parameters)):
            raise UpdateError(
                "the module has other parameters than those of the optimizer that was given to memgraph.compile, and "
                "no step would update them, as after fully_shard or load_state_dict(assign=True): make the optimizer "
                "of the new parameters, and compile with that"
            )

    def outputs(self, outputs: OutputSelector) -> OutputSelector:
        """Return from which outputs backward starts."""
        return outputs

    def resident_nbytes(self) -> int:
        """Return the bytes of parameters, buffers, gradients and optimizer states that are on the device now."""
        parameters = list(self.module.parameters())
        states = state_tensors(self.optimizer) if self.optimizer is not None else ()
        return resident_bytes([*parameters, *self.module.buffers(), *existing_gradients(parameters), *states])

    def key(self) -> tuple[Hashable, ...]:
        """Return what a step depends on: another key needs another plan."""
        return self.wrapper.averages, self.wrapper.shards

    def trained(self, captured: Captured) -> TrainedParameters:
        """Return what a captured step trains."""
        return TrainedParameters(self._with_gradients(captured), {}, captured=captured)

    def _with_gradients(self, captured: Captured) -> list[nn.Parameter]:
        names = {role.name for role in captured.outputs if role.kind == "gradient"}
        return [parameter for name, parameter in self.module.named_parameters() if name in names]

    def insert_ops(self, captured: Captured, trained: TrainedParameters) -> tuple[Captured, TrainedParameters]:
        """Insert updates and collectives into a captured step."""
        return captured, trained

    def ranks(self, trained: TrainedParameters, device: torch.device) -> Ranks:
        """Return the ranks that plan a step together."""
        return Ranks()

    def add_update(self, trace: Trace, graph: fx.Graph, trained: TrainedParameters) -> Trace:
        """Return the trace with optimizer states and update."""
        return trace

    def with_update(self, trace: Trace, captured: Captured) -> Trace:
        """Return the trace of a captured step with optimizer states and update, and with gradients of other steps."""
        trained = self.trained(captured)
        trace = self.add_update(self.with_others(trace, captured), captured.graph.graph, trained)
        # Ranks may hold different ones, and have to be cut alike.
        return trace if self.has_other_ranks else with_remaining_grads(trace, self.module, trained.parameters)

    def with_others(self, trace: Trace, captured: Captured) -> Trace:
        """Return the trace with what a wrapper around the module holds, and attributes from the step before."""
        trace = with_resident(trace, KEPT, captured.kept_nbytes, "attributes, which have tensors of the step before")
        return with_resident(trace, WRAPPER, self.wrapper.nbytes, "buffers of the wrapper that trains it over ranks")

    def price_update(self, trace: Trace, machine: Machine, trained: TrainedParameters) -> Trace:
        """Return the trace with the time of the update, where it decides between plans."""
        return trace

    def held_parameters(self) -> frozenset[str]:
        """Return the names of parameters that stay on the device, since tensors outside of the module hold their
        memory."""
        named = {name: p for name, p in self.module.named_parameters() if not is_offloaded(p)}
        saved = (tensor for run in concurrent_runs(named.values()) for tensor in run.saved_tensors())
        return frozenset(held_elsewhere(named, (*self.module.buffers(), *parameter_groups(self.optimizer), *saved)))

    def with_offloaded_state(self, machine: Machine, trained: TrainedParameters) -> Machine:
        """Return the machine with room for parameters and optimizer state in the tier, if they can be offloaded."""
        if not machine.link.out or not self.update.can_stream or describe_shared_memory(self.module, self.optimizer):
            return machine
        return self._with_windows(machine, trained)

    def _with_windows(self, machine: Machine, trained: TrainedParameters) -> Machine:
        window, speed = self.update.peak_nbytes(trained.parameters), self.update.host_rate(trained.states)
        ahead = self.update.nbytes_between(trained.parameters)
        return replace(machine, streaming=Streaming(True, window=window, update_staging=ahead, host_update_rate=speed))
