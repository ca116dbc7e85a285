"""The fixed parts of a planned step, complete before the step is made.

captured call, two halves, slots in the tier, fused update, ...   ->   StepParts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from passes import Plan, Trace

from ..graph.captured import Captured, Output
from ..graph.fuse_updates import updated_parameters
from ..graph.halves.partition import Partition, drop_unused
from ..optim.fused_update import FusedUpdate
from ..optim.tier_slots import OffloadedSlots
from ..oss.pending_gathers import PendingGathers
from ..oss.sharded_grads import ShardedGradients
from ..profile.memory_meter import resident_bytes
from ..storage.tiers import Tier
from .concurrent_runs import concurrent_runs, held_nbytes, waiting_nbytes
from .cuda_graph_checks import NOT_RECORDED, Recording
from .step_run import StepRun
from .tensor_roles import TensorRoles


@dataclass(frozen=True)
class RankCheck:
    """An agreement of all ranks on the step that they run; this one is for a rank alone.

    Attributes:
        begin: starts to compare this rank's step with the others'; the result waits, and raises if they differ.
        compare_guards: waits for all ranks, and raises unless the same guard has failed on each, or none.
        announce_failure: tells the other ranks that this one can't run the step.
    """

    begin: Callable[[], Callable[[], None]] = lambda: lambda: None
    compare_guards: Callable[[str], None] = lambda failure: None
    announce_failure: Callable[[], None] = lambda: None


@dataclass(frozen=True, eq=False)
class StepParts:
    """Everything that a step is made of.

    Attributes:
        roles: the role of each tensor that the step reads or makes.
        update_ops: the parameter that each update op in backward changes, by the op's name.
        tier: holds the slots of this step's own values.
        state_slots: the slots of parameters, gradients and optimizer state.
        trained: the parameters that the step makes gradients of.
        fused_update: updates parameters in backward.
        sharded_grads: averages gradients over ranks in backward.
        pending_gathers: updated parameters that forward gathers.
        generators: those of torch from which the step draws.
        draws_on_host: the step draws from those of `random` or numpy.
        accumulated_plan: a plan that fits when the same call adds to gradients.
    """

    captured: Captured
    halves: Partition
    roles: TensorRoles
    update_ops: dict[str, str]
    tier: Tier | None = None
    state_slots: OffloadedSlots | None = None
    trained: Sequence[Tensor] = ()
    fused_update: FusedUpdate | None = None
    sharded_grads: ShardedGradients | None = None
    pending_gathers: PendingGathers | None = None
    rank_check: RankCheck = RankCheck()
    recording: Recording = NOT_RECORDED
    generators: tuple[torch.Generator, ...] = ()
    draws_on_host: bool = False
    accumulated_plan: Plan | None = None
    _reduced: dict[frozenset[int], Partition] = field(default_factory=dict)

    @classmethod
    def of(cls, captured: Captured, halves: Partition, trace: Trace, tier: Tier | None = None) -> StepParts:
        """Return the parts of a step that runs `trace`; `replace` adds the optional ones."""
        update_ops = updated_parameters(halves.backward.graph) if halves.backward and captured.updates else {}
        added_nbytes = captured.joined_nbytes([op.nbytes for op in trace.ops if op.fn == "gradient"])
        return cls(captured, halves, TensorRoles.of(captured, added_nbytes, update_ops.values()), update_ops, tier)

    @property
    def has_collectives(self) -> bool:
        """True if other ranks read or write memory of the step while it runs."""
        return self.sharded_grads is not None or self.pending_gathers is not None

    @cached_property
    def unread(self) -> frozenset[int]:
        """The places of the caller's inputs that no op reads."""
        inputs = zip(self.captured.graph.graph.find_nodes(op="placeholder"), self.captured.graph_inputs, strict=True)
        read = {(role.kind, role.name, role.index) for node, role in inputs if node.users}
        return frozenset(place for key, place in self.roles.place.items() if key[0] == "input" and key not in read)

    def without_unread(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors for autograd: one that no op reads is cut off, as it is in eager."""
        if not any(tensors[place].grad_fn is not None for place in self.roles.varying):
            return tensors
        return [each.detach() if place in self.unread else each for place, each in enumerate(tensors)]

    def inputs_in_blocks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that the graph reads: of some parameters, views of their rows."""
        roles = [role for role in self.captured.inputs if role.kind != "tangent"]
        return [x for x in self.captured.in_blocks(roles, tensors) if x is not None]

    def gradients_in_blocks(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of parameters that the graph adds to: of some, views of their rows."""
        return self.captured.in_blocks([role for role in self.roles.gradients if role.kind == "gradient"], gradients)

    def halves_without(self, unused: frozenset[int]) -> Partition:
        """Return the halves for a backward in which these outputs get no gradient."""
        backward = self.halves.backward
        if not unused or backward is None:
            return self.halves
        if unused not in self._reduced:
            positions = [i for i, output in enumerate(self.roles.tangents) if output in unused]
            self._reduced[unused] = replace(
                self.halves, backward=drop_unused(backward, self.halves.tangent_names, positions)
            )
        return self._reduced[unused]

    def is_missing(self, role: Output, unused: frozenset[int]) -> bool:
        """Return True if eager makes no such gradient when these outputs get none."""
        return bool(unused) and self.captured.sources[role] <= unused

    def shard(self, bucket: int) -> Tensor | None:
        """Return this rank's shard of a bucket of gradients, if backward has left one."""
        return self.sharded_grads.shards.get(bucket) if self.sharded_grads is not None else None

    def gradients(self) -> list[Tensor]:
        """Return the gradients that exist now: of parameters, and this rank's shards."""
        shards = [shard for bucket in self.roles.shards if (shard := self.shard(bucket)) is not None]
        return shards + [parameter.grad for parameter in self.trained if parameter.grad is not None]

    def absent_nbytes(self, tensors: Sequence[Tensor]) -> int:
        """Return the forecast bytes that do not exist: gradients to add to, and what a recording would keep.

        Gradients that exist on the device although the forecast has them elsewhere count as negative.
        """
        shards = sum(nbytes for bucket, nbytes in self.roles.added_shards if self.shard(bucket) is None)
        existing = (tensors[place].grad for place, _ in self.roles.added)
        gradients = resident_bytes(gradient for gradient in existing if gradient is not None)
        return self.recording.kept_nbytes + shards + sum(nbytes for _, nbytes in self.roles.added) - gradients

    def open_runs(self, tensors: Sequence[Tensor], but: StepRun | None = None) -> list[StepRun]:
        """Return the other runs that are open over parameters of this step."""
        return concurrent_runs(map(tensors.__getitem__, self.roles.owners), but)

    def note_others(self, run: StepRun, tensors: Sequence[Tensor]) -> None:
        """Count what other open runs hold before the backward of `run`: their tensors, gradients that autograd has yet
        to sum, and gradients that no forecast knew of."""
        gradients = 0 if self.roles.adds else resident_bytes(self.gradients())
        others = held_nbytes(self.open_runs(tensors, run), tensors) + waiting_nbytes() + gradients
        run.others_nbytes = max(run.others_nbytes, others)
