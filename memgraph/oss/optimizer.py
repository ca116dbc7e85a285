"""A torch.optim.Optimizer whose work and state are sharded over ranks (ZeRO stage 1).

    plain, on each rank              on N ranks
    g: gradient of this batch        G = mean over ranks of g                      1/N of the elements on each
    update(p, g, state)              update(shard of p, shard of G, state of shard)
                                     p from all shards

The caller's optimizer class runs on the shards. An elementwise one gives the bits that it gives on whole parameters;
any other gets whole parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim

from ..errors import ShardError
from .average_grads import GradAverager
from .checkpoint.own_state import Entries
from .checkpoint.state_dict import StateDicts
from .clip_norm import NormLimit, clip_grad_norm
from .closure_optimizers import step_with_closure
from .comm.agreement import OPTIMIZER, check_agreement, parameter_lines, report_errors
from .comm.exchange import BucketComm
from .comm.model_parallel import ModelParallel, replicated_tensors
from .comm.shared_memory import shared_memory_comm
from .comm.watchdog import CollectiveWatchdog, optimizer_watchdogs
from .grad_presence import ANY_INFINITE, exchange_presence
from .grad_scaler import unscale
from .offloaded_states import OffloadedShards
from .pending_gathers import PendingGathers
from .sharded_grads import ShardedGradients
from .shards.layout import ShardLayout
from .shards.param_groups import Group, check_group, check_oss_arguments, check_parameters, copy_group, copy_groups
from .shards.shard_optimizer import ShardOptimizer
from .step import RELOAD, ShardedStep

BUCKET = 25 << 20  # bytes, as in DistributedDataParallel
ADVICE = (
    "Build the same model and the same groups on every rank; values are equal after the same torch.manual_seed, or if "
    "rank 0 sends its own: for p in model.parameters(): torch.distributed.broadcast(p.data, 0)"
)


class OSS(optim.Optimizer):
    """`optim(params, **defaults)`, sharded over the ranks of `group`.

    With `torch.amp.GradScaler`, a step that is not finite on one rank is left out on all; `memgraph.GradScaler` keeps
    the scale equal, too.

    Args:
        params: what `optim` takes: parameters, pairs of name and parameter, or dicts that are groups.
        optim: the class of the optimizer.
        group: the ranks; all of them if None.
        gradients: "average" to have `step` average them over the ranks, "same" if they are equal on all ranks already,
            as with DistributedDataParallel.
        wire_dtype: what float32 is rounded to when it is sent; None for nothing.
        bucket_bytes: how many bytes are sent at once.
        gather: "step" to end each step with all parameters on all ranks; "forward" to let the next forward of a
            compiled module gather those that it reads, each before its first use. Until then, what other ranks have
            updated is NaN: call `gather` before other code reads parameters.

    Raises:
        ShardError: there is no process group, or this can't be sharded; says what to do.
    """

    _step_supports_amp_scaling = True  # so a GradScaler calls `step` on every rank, also where it has found infinities

    def __init__(
        self,
        params: Iterable[Any],
        optim: type[optim.Optimizer] = optim.AdamW,
        group: dist.ProcessGroup | None = None,
        *,
        gradients: str = "average",
        wire_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET,
        gather: str = "step",
        **defaults: Any,
    ) -> None:
        self.watchdog = CollectiveWatchdog(check_group(group))
        with report_errors(self.watchdog, OPTIMIZER, ADVICE):
            checked = check_oss_arguments(
                optim=optim, gradients=gradients, gather=gather, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes
            )
            groups = copy_groups(params)
            self.comm = BucketComm(self.watchdog, wire_dtype)
            self.optimizer_class, self.gradients, self.gather_mode = optim, gradients, gather
            self.shard_optimizer = ShardOptimizer(optim, defaults, groups)
            owners = 1 if self.shard_optimizer.needs_closure else self.comm.ranks
            splits, nbytes = self.shard_optimizer.splits, checked["bucket_bytes"]
            self.layout = ShardLayout(self.comm.rank, self.comm.ranks, nbytes, splits, owners)
            self._add_parts()
            super().__init__(groups, self.shard_optimizer.defaults)
        self._compare(self.param_groups)
        self.shard_optimizer.create(self.layout, self.param_groups)
        if wire_dtype is None and not self.shard_optimizer.needs_closure:
            self.comm.shared_memory = shared_memory_comm(self.comm)
        optimizer_watchdogs.add(self.watchdog)

    def _add_parts(self) -> None:
        layout, comm, inner = self.layout, self.comm, self.shard_optimizer
        replicated = self.gradients == "same" or comm.is_alone
        self.states = StateDicts(layout, inner, self.watchdog)
        self.sharded_grads = ShardedGradients(layout, comm, replicated, self.refresh_views)
        self.pending_gathers = PendingGathers(layout, comm, self.refresh_views)
        self.offloaded_shards = OffloadedShards(self, layout, inner)
        self.averager = GradAverager(layout, comm, inner, self.sharded_grads)
        parts = self.averager, self.pending_gathers, self.offloaded_shards
        self.sharded_step = ShardedStep(layout, comm, inner, *parts)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise ShardError("a sharded optimizer can't be copied or pickled; load its state_dict() into another one")

    @property
    def inner(self) -> Any:
        """The optimizer that steps on this rank's shards."""
        return self.shard_optimizer.optimizer

    def add_param_group(self, param_group: Group) -> None:
        """Add a group with all options, in buckets of its own."""
        before, is_complete = list(self.param_groups), self.inner is not None
        try:
            with report_errors(self.watchdog, OPTIMIZER, ADVICE) if is_complete else nullcontext():
                self._add_local_group(param_group)
            if is_complete:
                self._compare(self.param_groups[-1:])
            self.layout.add_group(len(before), self.param_groups[-1])
        except ShardError:
            self.param_groups[:] = before
            raise
        if is_complete:
            self.shard_optimizer.add_group(self.layout, len(before), self.param_groups[-1])

    def _add_local_group(self, param_group: Group) -> None:
        added = copy_group(param_group)
        if self.averager.clipped is not None:
            raise ShardError("gradients have been clipped for the next step; call step() or zero_grad() before")
        if self.inner is not None:
            self.shard_optimizer.try_groups([*self.param_groups, added])
        super().add_param_group(added)
        check_parameters(self.param_groups[-1]["params"])

    def _compare(self, groups: Sequence[Group]) -> None:
        if not self.comm.is_alone:
            sent = f"gradients={self.gradients!r}, wire_dtype={self.comm.wire}, bucket_bytes={self.layout.bucket_bytes}"
            first, *others = parameter_lines(self.optimizer_class.__qualname__, groups)
            lines = [first, f"what is sent: {sent}, gather={self.gather_mode!r}", *others]
            check_agreement(self.watchdog, lines, ADVICE)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update all parameters, on all ranks; every rank of the group has to call it.

        Raises:
            ShardError: a parameter has changed in kind, or the closure failed, on this rank or another, and nothing
                has changed; or the optimizer failed on another rank, and no step is made until an earlier state of
                model and optimizer is loaded on all ranks. The rank itself raises its own error.
            AgreementError: options of groups, or frozen parameters, are not the same on all ranks. Nothing has changed.
            SpillError: the disk of some rank failed. The next call, on all ranks, resumes the step.
            CollectiveError: a rank is gone or late.
        """
        self._refuse_half_updated()
        self.states.consolidated = None
        with torch.no_grad():
            if self.sharded_step.is_resumable():
                loss = self.sharded_step.resume()
            elif self.shard_optimizer.needs_closure:
                return step_with_closure(self.averager, self._prepare, closure, self.param_groups, kwargs)
            else:
                loss, error = self._prepare(closure)
                kinds, infinite = self._agree(error)
                if not infinite:
                    self.sharded_step.run(self.param_groups, kinds, kwargs, loss)
            self.averager.clipped = None
            return loss

    def gather(self) -> None:
        """Gather what other ranks have updated, if that was left to the next forward. Every rank of the group has to
        call it, and may do so at any time.

        Raises:
            AgreementError: another rank does something else.
            CollectiveError: a rank did not come.
        """
        self._refuse_half_updated()
        self.pending_gathers.gather()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, owned or not, and free this rank's shards of them."""
        self.averager.clipped = None
        super().zero_grad(set_to_none)
        self.sharded_grads.drop_cleared()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = False,
        *,
        group: dist.ProcessGroup | None = None,
        replicated: Iterable[Tensor] = (),
    ) -> Tensor:
        """Scale the averaged gradient of all parameters down to a norm; every rank of the group has to call it.

        Args:
            group: the ranks that have the other parts of the same parameters, as with tensor parallelism; the norm is
                then that of the whole parameters. All of its ranks have to call it, too.
            replicated: the parameters that are whole on each rank of that `group`, which count once.

        Returns:
            the norm before clipping, as `torch.nn.utils.clip_grad_norm_` does

        Raises:
            ShardError: a parameter has changed in kind, on this rank or another.
            AgreementError: ranks were given different arguments, options or frozen parameters. Nothing is scaled.
            TypeError: `max_norm` or `norm_type` is no number, or `replicated` no iterable of tensors.
            ValueError: `max_norm` is negative or not a number, this rank is not in `group`, or something `replicated`
                is no parameter of this optimizer. On the other ranks such an error is a ShardError.
        """
        self._refuse_half_updated()

        def check_arguments() -> tuple[NormLimit, ModelParallel | None]:
            limit = NormLimit.of(max_norm, norm_type, error_if_nonfinite)
            whole = replicated_tensors(replicated)
            return limit, None if group is None else ModelParallel.of(group, whole, self.layout.parameters)

        with torch.no_grad():
            if self.sharded_step.is_resumable():
                raise ShardError("a disk has interrupted a step, which can be resumed: call step() again on all ranks")
            checked, error = self._prepare(check_arguments)
            limit, parallel = checked or (None, None)
            kinds, _ = self._agree(error, limit)
            assert limit is not None  # otherwise `_agree` has raised the error
            grads = self.averager.clipped or self.averager.average_all(kinds)
            total = clip_grad_norm(self.layout, self.comm, grads, limit, parallel)
            grads.note_versions()
            self.averager.clipped = None if self.averager.replicated else grads
            return total

    def _prepare(self, closure: Callable[[], Any] | None) -> tuple[Any, BaseException | None]:
        """Run the closure and check this rank's gradients; return the loss, and an error for `_agree` to exchange."""
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.refresh_views()
            self.sharded_grads.drop_cleared()
            self.averager.check_grads()
        except Exception as error:
            return loss, error
        return loss, None

    def _agree(self, error: BaseException | None, limit: NormLimit | None = None) -> tuple[list[int], bool]:
        """Return the kinds of gradients, and True if a GradScaler has found infinities on any rank."""
        scale, infinite = vars(self).get("grad_scale"), vars(self).get("found_inf")
        flags = {
            "a call of clip_grad_norm_": limit is not None,
            "clipped gradients": self.averager.clipped is not None,
            "a GradScaler": infinite is not None,
            "scaled gradients": scale is not None,
            ANY_INFINITE: infinite is not None and bool(infinite),
        }
        call = "a step" if limit is None else str(limit)
        kinds, on_any = exchange_presence(self.comm, self.layout, self.param_groups, error, flags, call)
        self.sharded_grads.kinds = kinds
        if scale is not None and not on_any[ANY_INFINITE]:
            unscale(self.layout, self.comm, self.averager.clipped, scale)
        return kinds, on_any[ANY_INFINITE]

    def _refuse_half_updated(self) -> None:
        if self.sharded_step.is_half_updated:
            message = "a step failed when some parameters were updated, and ranks may differ"
            raise ShardError(f"{message}; {RELOAD}, or start again from it if a collective has failed")

    def refresh_views(self) -> None:
        """Renew the shards of parameters that were assigned other memory, and move their states.

        Raises:
            ShardError: a parameter has another shape, dtype, strides or device, and the optimizer has states.
        """
        if self.layout.has_other_specs() and self.shard_optimizer.is_fresh:
            self._reset_layout()
            return
        try:
            renewed = self.layout.refresh()
        except ShardError as error:
            if not self.pending_gathers.buckets:
                raise
            advice = "change it back and call optimizer.gather() on all ranks before, as ranges of it are NaN here"
            raise ShardError(f"{error}; {advice}") from None
        self.shard_optimizer.replace_views(self.layout, renewed)

    def _reset_layout(self) -> None:
        """Lay out parameters again as they are now; there are no states yet."""
        self.sharded_grads.refuse_if_any()
        self.pending_gathers.reset()
        self.offloaded_shards.offloaded_owners.clear()
        self.layout.reset()
        for i, group in enumerate(self.param_groups):
            self.layout.add_group(i, group)
        self.shard_optimizer.create(self.layout, self.param_groups)

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Copy the whole state to the rank `to` of the group, or to all if it is None or -1.

        Every rank has to call it. The copy stays in host memory until the next step.

        Raises:
            AgreementError: ranks were given different ranks.
            StateError: something in the state can't be sent, or there is no such rank.
            CollectiveError: a rank did not come.
        """
        self.states.consolidate(to, self.sharded_step.is_incomplete)

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """Return the plain optimizer's state dict: a copy as old as the last step, with the options of now.

        A new optimizer has an empty state.

        Args:
            all_ranks: gather it on all ranks now; every rank has to call it.

        Raises:
            StateError: it was not consolidated on this rank since the last step.
        """
        if all_ranks or self.comm.is_alone:
            self.consolidate_state_dict(None)
        return self._state_dict(self.states.of_this_rank())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a plain optimizer's state dict; every rank has to call it, with the same.

        Raises:
            StateError: it is not one of this optimizer; says where it differs. Nothing was changed on any rank.
            AgreementError: the ranks were given different ones. Nothing was changed.
        """
        given: Any = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        with self.states.reporting_errors():
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                changed = hook(self, given)
                given = given if changed is None else changed
            mismatch = self._find_mismatch(given)
        self.states.refuse_mismatch(given, mismatch)
        self._install(given)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return a state dict that torch.distributed.checkpoint saves: each rank has rows of each tensor, as a DTensor.

        Every rank has to call it. It is a copy, on disk where states are offloaded.
        """
        offloaded = self.offloaded_shards
        with self.watchdog.leaving_on_error():
            groups, on_disk = self._state_dict({}), bool(offloaded.offloaded_owners)
            state = self.states.sharded(on_disk, offloaded.location, self.sharded_step.is_incomplete)
            return {**groups, "state": state}

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what torch.distributed.checkpoint has read into a sharded state dict; every rank has to call it.

        Raises:
            StateError: it is not one of this optimizer; says where it differs. Nothing was changed on any rank.
        """
        self.refuse_sharded(state_dict)
        self._install(state_dict, sharded=True)

    def refuse_sharded(self, state_dict: Mapping[str, Any]) -> None:
        """Check a sharded state dict on all ranks, each its own part.

        Raises:
            StateError: on all ranks, if one can't load it.
        """
        self.states.refuse_sharded_mismatch(state_dict, self._find_mismatch(state_dict, sharded=True))

    def _find_mismatch(self, given: object, sharded: bool = False) -> str | None:
        try:
            self.refresh_views()
        except ShardError as error:
            return str(error)
        return self.states.find_mismatch(self.param_groups, given, sharded)

    def _state_dict(self, state: Mapping[int, Entries]) -> dict[str, Any]:
        before, parameters = self.state, self.layout.parameters
        self.state = defaultdict(dict, {parameters[item]: dict(entries) for item, entries in state.items()})
        try:
            return super().state_dict()
        finally:
            self.state = before

    def _install(self, state_dict: Mapping[str, Any], sharded: bool = False) -> None:
        self.param_groups = self.states.install(state_dict, self.param_groups, sharded)
        self.sharded_step.note_loaded()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)
