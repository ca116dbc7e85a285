"""An optimizer whose work and state are spread over ranks.

    plain, on each rank              on N ranks
    g: gradient of this batch        G = mean over ranks of g                      1/N of the elements on each
    update(p, g, state)              update(piece of p, piece of G, state of piece)
                                     p from all pieces

    optimizer = memgraph.OSS(model.parameters(), torch.optim.AdamW, lr=3e-4)

The caller's own optimizer class runs on the pieces. One that changes each element by itself cannot tell, and gives the
bits that it gives on whole parameters; any other gets whole parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim

from passes.shards import Item, Sizes, loads_of, shards

from ..errors import ShardError
from ..optim.elementwise import EXACT_DTYPES, is_elementwise
from ..optim.optimizer_clone import unclonable_reason
from ..tensors.layout import is_dense
from .average_grads import GradAverager
from .checkpoint.state_dict import StateDictMixin
from .clip_norm import NormLimit, clip_grad_norm
from .closure_optimizers import step_with_closure
from .comm.agreement import OPTIMIZER, check_agreement, parameter_lines, report_errors
from .comm.exchange import BucketComm
from .comm.model_parallel import ModelParallel, tensors_of
from .comm.shared_memory import SharedMemoryComm, shared_memory_comm
from .comm.watchdog import CollectiveWatchdog
from .grad_presence import ANY_INFINITE, exchange_presence
from .grad_scaler import unscale
from .held_gradients import HeldGradients
from .offloaded_states import OffloadedShards
from .pending_gathers import PendingGathers
from .sharded_grads import ShardedGradients
from .shards.arguments import arguments, ready
from .shards.param_groups import Group, copied, groups_of, options, template
from .shards.shard_views import ShardViews
from .step import MEND, ShardedStep

BUCKET = 25 << 20  # bytes, as DistributedDataParallel's
ALONE = 1 << 20  # bytes of a stretch that is worth a message of its own
CACHED = 1 << 20  # bytes of a piece: what an update reads again and again stays in the cache of a CPU
VECTOR = 64  # elements: no kernel takes more at once
ADVICE = (
    "Build the same model and the same groups on every rank; values are equal after the same torch.manual_seed, or if "
    "rank 0 sends its own: for p in model.parameters(): torch.distributed.broadcast(p.data, 0)"
)
_living: weakref.WeakSet[OSS] = weakref.WeakSet()


class OSS(StateDictMixin):
    """`optim(params, **defaults)`, spread over the ranks of `group`.

    With `torch.amp.GradScaler`, a step that is not finite on one rank is left out on all; `memgraph.GradScaler` keeps
    the scale equal, too.

    Args:
        params: what `optim` takes: parameters, pairs of name and parameter, or dicts that are groups.
        optim: the class of the optimizer.
        group: the ranks; all of them if None.
        gradients: "average" to have `step` average them over the ranks, "same" if they are so already, as with
            DistributedDataParallel.
        wire_dtype: what float32 is rounded to on its way; None for nothing.
        bucket_bytes: how many bytes are sent at once.
        gather: "step" to end each step with all parameters on all ranks; "forward" to let the next forward of a
            compiled module gather those that it reads, each before its first use. Until then, what other ranks have
            updated is NaN: who reads parameters in between calls `gather` before.

    Raises:
        ShardError: there is no process group, or this can't be spread; says what to do.
    """

    _step_supports_amp_scaling = True  # so that a GradScaler calls `step` on every rank, whatever it has found

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
        self.watch = CollectiveWatchdog(ready(group))
        with report_errors(self.watch, OPTIMIZER, ADVICE):
            own = arguments(optim, gradients, gather, wire_dtype, bucket_bytes)
            groups = groups_of(params)
            self.exchange = BucketComm(self.watch, wire_dtype)
            self.optim, self.given, self.gathers = optim, defaults, gather
            self.gradients, self.bucket_bytes = gradients, own["bucket_bytes"]  # which may have been numpy's
            plain = template(optim, groups, defaults)
            # A step that changes more than its parameters' states is run once for all of them.
            self.is_cut = is_elementwise(plain) and not unclonable_reason(plain)
            self.is_driven = issubclass(optim, torch.optim.LBFGS)
            self.pieces = ShardViews(self.exchange.rank, self.exchange.ranks)
            self.items: list[Item] = []
            self.group_of: list[int] = []  # of each parameter
            self.held: HeldGradients | None = None
            self.inner: Any = None  # the optimizer that runs on the pieces of this rank
            self.inside, self.awaited, self.far = ShardedGradients(self), PendingGathers(self), OffloadedShards(self)
            super().__init__(groups, dict(plain.defaults))
        self._compare(self.param_groups)
        self.inner = optim([self._inner_group(i) for i in range(len(groups))], **defaults)
        self.near = shared_memory_comm(self.exchange) if wire_dtype is None and not self.is_driven else None
        self.averages, self.updates = GradAverager(self), ShardedStep(self)
        _living.add(self)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise ShardError("a sharded optimizer can't be copied or pickled; load its state_dict() into another one")

    def add_param_group(self, param_group: Group) -> None:
        """One more group, complete at once, in buckets of its own."""
        before = list(self.param_groups)
        try:
            with nullcontext() if self.inner is None else report_errors(self.watch, OPTIMIZER, ADVICE):
                self._take(param_group)
            if self.inner is not None:
                self._compare(self.param_groups[-1:])
            self._lay_out(len(before), self.param_groups[-1]["params"])
        except ShardError:
            self.param_groups[:] = before
            raise
        self.gathered = None
        if self.inner is not None:
            group = self._inner_group(len(before))
            self.inner.add_param_group(dict(group))
            # Adagrad makes its states where it is made, and not for groups that come later.
            self.inner.state.update(self.optim([group], **self.given).state)

    def _take(self, param_group: Group) -> None:
        """One more group, as far as this rank alone can tell."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group is a {type(param_group).__name__}; give a dict")
        added = copied(param_group)
        if self.held is not None:
            raise ShardError("gradients have been clipped for the next step; call step() or zero_grad() before")
        if self.inner is not None:
            template(self.optim, [*self.param_groups, added], self.given)  # which refuses what it does not take
        super().add_param_group(added)
        parameters = self.param_groups[-1]["params"]
        if len(set(parameters)) != len(parameters):
            raise ShardError("a parameter is twice in one group; give each parameter once")
        if empty := [i for i, parameter in enumerate(parameters) if parameter.is_meta]:
            found = f"parameter {empty[0]} of the group is on the meta device, where it has no values"
            raise ShardError(f"{found}; give the module a device (to_empty) and values, then make the optimizer")

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update all parameters, on all ranks; every rank of the group has to call it.

        Raises:
            ShardError: a parameter is no longer what it was, or the closure failed, on this rank or another, and
                nothing has changed; or the optimizer failed on another rank, and no step is made until an earlier state
                of model and optimizer is loaded on all ranks. The rank itself raises its own error.
            AgreementError: options of groups, or frozen parameters, are not the same on all ranks. Nothing has changed.
            SpillError: the disk of some rank failed. The next call, on all ranks, goes on with the same step.
            CollectiveError: a rank is gone or late.
        """
        self._refuse_torn()
        self.gathered = None
        with torch.no_grad():
            if self.updates.goes_on():
                loss = self.updates.go_on()
                self.held = None
                return loss
            if self.is_driven:
                return step_with_closure(self, closure, kwargs)
            loss, trouble = self.prepare(closure)
            kinds, infinite = self._agree(trouble)
            if not infinite:
                self.updates.run(kinds, kwargs, loss)
            self.held = None
            return loss

    def _compare(self, groups: Sequence[Group]) -> None:
        """See that all ranks were given the same."""
        if self.exchange.is_alone:
            return
        sent = f"gradients={self.gradients!r}, wire_dtype={self.exchange.wire}, bucket_bytes={self.bucket_bytes}"
        sent += f", gather={self.gathers!r}"
        first, *others = parameter_lines(self.optim.__qualname__, groups)
        check_agreement(self.watch, [first, f"what is sent: {sent}", *others], ADVICE)

    def gather(self) -> None:
        """Bring here what other ranks have updated, if that was left to the next forward; every rank of the group has
        to call it, and may do so at any time.

        Raises:
            AgreementError: another rank does something else.
            CollectiveError: a rank did not come.
        """
        self._refuse_torn()
        self.awaited.gather()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, owned or not."""
        self.held = None
        super().zero_grad(set_to_none)

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
            the norm as it was, as `torch.nn.utils.clip_grad_norm_` does

        Raises:
            ShardError: a parameter is no longer what it was, on this rank or another.
            AgreementError: ranks were given different arguments, options or frozen parameters. Nothing is scaled.
            TypeError: `max_norm` or `norm_type` is no number, or `replicated` no iterable of tensors.
            ValueError: `max_norm` is negative or not a number, this rank is not in `group`, or something `replicated`
                is no parameter of this optimizer. On the other ranks such an error is a ShardError.
        """
        self._refuse_torn()

        def asked() -> tuple[NormLimit, ModelParallel | None]:
            limit = NormLimit.of(max_norm, norm_type, error_if_nonfinite)
            whole = tensors_of(replicated)
            return limit, None if group is None else ModelParallel.of(group, whole, self.pieces.parameters)

        with torch.no_grad():
            if self.updates.goes_on():
                raise ShardError("the disk has interrupted a step, which can go on: call step() again on all ranks")
            found, trouble = self.prepare(asked)
            limit, parallel = found or (None, None)
            kinds, _ = self._agree(trouble, limit)
            assert limit is not None  # or there was trouble
            held = self.held or self.averages.hold(kinds)
            total = clip_grad_norm(self, held, limit, parallel)
            self.held = None if self.are_same else held.seen_now()
            return total

    @property
    def are_same(self) -> bool:
        """Whether all ranks have the same gradients."""
        return self.gradients == "same" or self.exchange.is_alone

    def prepare(self, closure: Callable[[], Any] | None) -> tuple[Any, BaseException | None]:
        """What the closure returns, and what went wrong."""
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.follow()
            self.inside.sweep()
            self._refuse()
            if self.held is not None and not self.held.is_of(self.pieces.parameters):
                self.held = None
        except Exception as error:
            return loss, error
        return loss, None

    def _agree(self, trouble: BaseException | None, limit: NormLimit | None = None) -> tuple[list[int], bool]:
        """Which gradients there are, and whether a GradScaler has found that a rank's are not finite."""
        scale, infinite = vars(self).get("grad_scale"), vars(self).get("found_inf")
        flags = {
            "a call of clip_grad_norm_": limit is not None,
            "clipped gradients": self.held is not None,
            "a GradScaler": infinite is not None,
            "scaled gradients": scale is not None,
            ANY_INFINITE: infinite is not None and bool(infinite),
        }
        asked = "a step" if limit is None else str(limit)
        kinds, found = exchange_presence(self.exchange, self.pieces, self.param_groups, trouble, flags, asked)
        self.inside.kinds = kinds
        if scale is not None and not found[ANY_INFINITE]:
            unscale(self, scale)
        return kinds, found[ANY_INFINITE]

    @property
    def neighbours(self) -> SharedMemoryComm | None:
        """The ranks, if they can read each other's parameters."""
        parameters = self.pieces.parameters
        return self.near if all(p.device.type == "cpu" and is_dense(p) for p in parameters) else None

    def _refuse_torn(self) -> None:
        """Raise if a step has failed halfway; others may be anywhere in it, so nothing can be asked of them."""
        if self.updates.is_torn:
            message = "a step failed when some parameters were updated, and ranks may differ"
            raise ShardError(f"{message}; {MEND}, or start again from it if a collective has failed")

    def _refuse(self) -> None:
        """Raise what is in the way of a step on this rank."""
        pairs = [(i, p, p.grad) for i, p in enumerate(self.pieces.parameters) if p.grad is not None]
        for i, p, gradient in pairs:
            if gradient.dtype != p.dtype or gradient.device != p.device:
                found = f"{gradient.dtype} on {gradient.device}"
                raise ShardError(f"parameter {i} is {p.dtype} on {p.device}, its gradient {found}; make them the same")
        dense = (gradient for _, _, gradient in pairs if not gradient.is_sparse)
        if not self.are_same and not self.exchange.fit(dense):
            raise ShardError(f"gradients leave the range of {self.exchange.wire}; use wire_dtype=torch.bfloat16")

    def follow(self) -> None:
        """Parameters that lie elsewhere now get new pieces, with the states of the old ones."""
        state = self.inner.state
        if self.pieces.are_others() and _is_fresh(state):
            self._begin_anew()
            return
        try:
            renewed = self.pieces.renew()
        except ShardError as error:
            if not self.awaited.buckets:
                raise
            missing = "turn it back and call optimizer.gather() on all ranks before, as ranges of it are NaN here"
            raise ShardError(f"{error}; {missing}") from None
        for was, view in renewed:
            if was in state:
                state[view] = state.pop(was)
        if renewed:
            for i, group in enumerate(self.inner.param_groups):
                group["params"][:] = self._inner_group(i)["params"]  # LBFGS holds this very list

    def _begin_anew(self) -> None:
        """Spread parameters of which there is no state yet, as they are now."""
        self.inside.refuse_parts()
        self.awaited.begin_anew()
        self.far.offloaded_owners.clear()  # they are of buckets that go
        self.pieces, self.items, self.group_of = ShardViews(self.exchange.rank, self.exchange.ranks), [], []
        for i, group in enumerate(self.param_groups):
            self._lay_out(i, group["params"])
        self.inner = self.optim([self._inner_group(i) for i in range(len(self.param_groups))], **self.given)

    def _lay_out(self, group: int, parameters: Sequence[Tensor]) -> None:
        """Spread the parameters of a group, behind those that are there."""
        kinds: dict[object, int] = {}
        fused = bool(self.param_groups[group].get("fused"))  # reads everything once, and rounds a rest in another way
        items = [
            _item(p, kinds.setdefault((p.dtype, p.device, p.requires_grad), len(kinds)), self.is_cut, fused)
            for p in parameters
        ]
        on_cpu = all(p.device.type == "cpu" for p in parameters)
        sizes = Sizes(self.bucket_bytes, ALONE, CACHED if on_cpu and not fused else None)
        ranks = 1 if self.is_driven else self.exchange.ranks
        loads = loads_of([laid.bucket for laid in self.pieces.laid], self.items, ranks)
        buckets = [bucket.behind(len(self.items)) for bucket in shards(items, ranks, sizes, loads)]
        self.pieces.add(parameters, buckets)
        self.items += items
        self.group_of += [group] * len(items)

    def _inner_group(self, index: int) -> Group:
        """A group of the optimizer that runs on pieces."""
        own = [one for laid in self.pieces.laid for one in laid.own if self.group_of[one[0].item] == index]
        # In the order of the caller's parameters: LBFGS sums over all of them.
        own.sort(key=lambda one: (one[0].item, one[0].begin))
        return {**options(self.param_groups[index]), "params": [view for _, view in own]}


def _is_fresh(state: Mapping[Any, Any]) -> bool:
    """Whether no step was made: some optimizers make their states before."""
    return all("step" in one and float(one["step"]) == 0 for one in state.values() if one)


def _item(p: Tensor, kind: int, is_cut: bool, fused: bool) -> Item:
    whole = not is_cut or not is_dense(p) or p.is_complex()
    quantum = 1 if p.dtype in EXACT_DTYPES and not fused else VECTOR
    return Item(p.numel(), p.element_size(), kind, whole, not p.requires_grad, quantum)


def only_watch() -> CollectiveWatchdog | None:
    """The watch of the group that all sharded optimizers of this process are spread over; None if there is no such
    group, or more than one."""
    found: dict[dist.ProcessGroup, CollectiveWatchdog] = {}
    for optimizer in list(_living):
        group = optimizer.watch.group
        with suppress(KeyError, ValueError, RuntimeError):  # of a group that was destroyed
            if dist.is_initialized() and dist.get_rank(group) >= 0:
                found[group] = optimizer.watch
    return next(iter(found.values())) if len(found) == 1 else None
