"""The fixed parts of a planned step, complete before the step is made.

captured call, two halves, slots in the tier, fused update, ...   ->   StepParts

The roles of the tensors that a step reads and returns.

reads w, b, x; returns y, dw, db    ->   one output; dw is the gradient of input 0, db of input 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from passes import Plan, Trace

from ..graph.captured import Captured, Output
from ..graph.fuse_updates import updated_parameters
from ..graph.halves.partition import Partition, drop_unused
from ..guards.owned_tensors import has_hooks
from ..optim.fused_update import FusedUpdate
from ..optim.tier_slots import OffloadedSlots
from ..oss.pending_gathers import PendingGathers
from ..oss.sharded_grads import ShardedGradients
from ..profile.memory_meter import resident_bytes
from ..storage.tiers import Tier
from .concurrent_runs import concurrent_runs, held_nbytes, waiting_nbytes
from .cuda_graph_checks import NOT_RECORDED, Recording
from .step_run import StepRun

Key = tuple[str, str, int]  # kind, name and index of an input


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
    def cut_off(self) -> frozenset[int]:
        """The places of the caller's inputs that no op reads, or to which forward lets no gradient flow."""
        inputs = zip(self.captured.graph.graph.find_nodes(op="placeholder"), self.captured.graph_inputs, strict=True)
        read = {(role.kind, role.name, role.index) for node, role in inputs if node.users}
        places = {place: key in read for key, place in self.roles.place.items() if key[0] == "input"}
        # Backward from other outputs than planned may find more gradients.
        is_sure = len(self.captured.tangents) == len(self.captured.differentiable)
        flows = {*self.roles.targets} if is_sure else places.keys()
        return frozenset(place for place, is_read in places.items() if not is_read or place not in flows)

    def without_cut_off(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors for autograd: one to which no gradient flows is cut off, as it is in eager."""
        if not any(tensors[place].grad_fn is not None for place in self.roles.varying):
            return tensors
        return [each.detach() if place in self.cut_off else each for place, each in enumerate(tensors)]

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


@dataclass(frozen=True, eq=False)
class TensorRoles:
    """The tensors of one step.  Places are positions among its inputs, without tangents.

    Attributes:
        outputs: the number of tensors that forward returns to the caller.
        tangents: the outputs that backward starts from.
        gradients: what backward returns; behind them come this rank's shards of the buckets `shards`.
        updates: the places of the parameters that backward updates, by name.
        exchanged: the places of the parameters whose gradients backward averages over ranks, by name.
        added_nbytes: of the gradients, then of the shards, that backward adds to; empty if it adds to none.
    """

    outputs: int
    tangents: tuple[int, ...]
    gradients: tuple[Output, ...]
    shards: tuple[int, ...]
    place: Mapping[Key, int]
    updates: Mapping[str, int]
    exchanged: Mapping[str, int]
    added_nbytes: tuple[int, ...]

    @classmethod
    def of(cls, captured: Captured, added_nbytes: Sequence[int], updated: Iterable[str]) -> TensorRoles:
        """Return the roles in a captured step; `updated` are the parameters that backward updates."""
        inputs = [role for role in captured.inputs if role.kind != "tangent"]
        place: dict[Key, int] = {(role.kind, role.name, role.index): i for i, role in enumerate(inputs)}
        return cls(
            outputs=sum(role.kind == "output" for role in captured.outputs),
            tangents=tuple(role.index for role in captured.inputs if role.kind == "tangent"),
            gradients=tuple(role for role in captured.outputs if role.kind not in ("output", "shard")),
            shards=tuple(role.index for role in captured.outputs if role.kind == "shard"),
            place=place,
            updates={name: place["parameter", name, -1] for name in updated},
            exchanged={name: place["parameter", name, -1] for name in captured.reduced},
            added_nbytes=tuple(added_nbytes),
        )

    @property
    def adds(self) -> bool:
        """Return True if backward adds to existing gradients."""
        return bool(self.added_nbytes)

    @cached_property
    def added(self) -> tuple[tuple[int, int], ...]:
        """The places of the parameters whose gradients backward adds to, with the bytes of each."""
        return tuple(zip(self._trained, self.added_nbytes[: len(self._trained)], strict=True)) if self.adds else ()

    @cached_property
    def added_shards(self) -> tuple[tuple[int, int], ...]:
        """The buckets whose shards backward adds to, with the bytes of each."""
        return tuple(zip(self.shards, self.added_nbytes[len(self._trained) :], strict=True)) if self.adds else ()

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The places of all parameters that backward computes gradients of."""
        return (*self._trained, *self.updates.values(), *self.exchanged.values())

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """The places of the inputs that the gradients belong to."""
        return tuple(map(self._target, self.gradients))

    def owners_of_gradients(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Return, for each gradient, the parameter whose `.grad` backward may set by itself; None for the others."""
        rows = zip(self.gradients, self.targets, strict=True)
        owners = [tensors[place] if role.kind == "gradient" else None for role, place in rows]
        return [None if owner is None or has_hooks(owner) else owner for owner in owners]

    @cached_property
    def varying(self) -> tuple[int, ...]:
        """The places of the caller's inputs."""
        return tuple(i for (kind, _, _), i in self.place.items() if kind == "input")

    def _target(self, role: Output) -> int:
        return self.place["parameter" if role.kind == "gradient" else "input", role.name, role.index]

    @cached_property
    def _trained(self) -> tuple[int, ...]:
        rows = zip(self.gradients, self.targets, strict=True)
        return tuple(target for role, target in rows if role.kind == "gradient")
