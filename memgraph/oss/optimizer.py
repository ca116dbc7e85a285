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

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim

from passes.shards import Item, shards

from ..errors import ShardError
from ..pointwise import EXACT, POINTWISE, is_pointwise, unhooked
from .exchange import Begun, Exchange, on, place
from .pieces import Pieces, flat, in_order_of, is_dense

BUCKET = 25 << 20  # bytes, as DistributedDataParallel's
ALONE = 1 << 20  # bytes of a stretch that is worth a message of its own
AHEAD = 2  # buckets that are sent while one is updated
VECTOR = 64  # elements: no kernel takes more at once
GRADIENTS = ("average", "same")
Options = dict[str, Any]


class OSS(optim.Optimizer):
    """`optim(params, **defaults)`, spread over the ranks of `group`.

    Args:
        params: what `optim` takes: parameters, pairs of name and parameter, or dicts that are groups.
        optim: the class of the optimizer.
        group: the ranks; all of them if None.
        gradients: "average" to have `step` average them over the ranks, "same" if they are so already, as with
            DistributedDataParallel.
        wire_dtype: what float32 is rounded to on its way; None for nothing.
        bucket_bytes: how many bytes are sent at once.

    Raises:
        ShardError: there is no process group, or this can't be spread; says what to do.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optim: type[optim.Optimizer] = optim.AdamW,
        group: dist.ProcessGroup | None = None,
        *,
        gradients: str = "average",
        wire_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET,
        **defaults: Any,
    ) -> None:
        if gradients not in GRADIENTS:
            raise ShardError(f"gradients={gradients!r}; give one of {', '.join(map(repr, GRADIENTS))}")
        groups = _groups(params)
        self.exchange = Exchange(_ready(group))
        self.optim, self.given, self.gradients = optim, defaults, gradients
        self.wire_dtype, self.bucket_bytes = wire_dtype, bucket_bytes
        template = optim(_stand_ins(optim, groups), **defaults)
        self.is_cut = is_pointwise(template)
        self.pieces = Pieces([], [], self.exchange.rank)
        self.group_of: list[int] = []  # of each parameter
        self.inner: Any = None
        super().__init__(groups, dict(template.defaults))
        self.inner = optim([self._inner_group(i) for i in range(len(groups))], **defaults)

    def add_param_group(self, param_group: Options) -> None:
        """One more group, complete at once, in buckets of its own."""
        before = list(self.param_groups)
        super().add_param_group(_copied(param_group))
        parameters = self.param_groups[-1]["params"]
        if len(set(parameters)) != len(parameters):
            self.param_groups[:] = before
            raise ShardError("a parameter is twice in one group; give each parameter once")
        self._lay_out(len(before), parameters)
        if self.inner is not None:
            group = self._inner_group(len(before))
            self.inner.add_param_group(dict(group))
            # Adagrad makes its states where it is made, and not for groups that come later.
            self.inner.state.update(self.optim([group], **self.given).state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update all parameters, on all ranks; every rank of the group has to call it.

        Raises:
            ShardError: a parameter is no longer what it was. Nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        present = self._present()
        if self.is_cut:
            self._update_buckets(present, kwargs)
        else:
            self._update_wholes(present, kwargs)
        return loss

    def _lay_out(self, group: int, parameters: Sequence[Tensor]) -> None:
        """Spread the parameters of a group, behind those that are there."""
        first = len(self.pieces.parameters)
        kinds: dict[object, int] = {}
        items = []
        for p in parameters:
            kind = kinds.setdefault((p.dtype, p.device, p.requires_grad), len(kinds))
            items.append(_item(p, kind, self.is_cut))
        laid = shards(items, self.exchange.ranks, self.bucket_bytes, ALONE)
        self.group_of += [group] * len(parameters)
        self.pieces.add(parameters, [bucket.behind(first) for bucket in laid])

    def _inner_group(self, index: int) -> Options:
        """A group of the optimizer that runs on pieces."""
        own = [view for bucket in self.pieces.own for piece, view in bucket if self.group_of[piece.item] == index]
        return {**_options(self.param_groups[index]), "params": own}

    def _present(self) -> list[bool]:
        """Which parameters have a gradient on any rank."""
        trouble: ShardError | None = None
        try:
            self._follow(self.pieces.moved())
        except ShardError as error:
            trouble = error
        flags = [trouble is not None, *(p.grad is not None for p in self.pieces.parameters)]
        device = self.pieces.parameters[0].device
        found = self.exchange.most(torch.tensor(flags, dtype=torch.int32, device=on(self.exchange, device))).tolist()
        if trouble is not None:
            raise trouble
        if found[0]:
            raise ShardError("another rank can't step, and says why; nothing has changed")
        return [bool(flag) for flag in found[1:]]

    def _follow(self, moved: Sequence[int]) -> None:
        """New views of the parameters that lie elsewhere now, with the states of the old ones."""
        if not moved:
            return
        before, state = self.pieces, self.inner.state
        self.pieces = Pieces(before.parameters, before.buckets, before.rank)
        for old, new in zip(before.own, self.pieces.own, strict=True):
            for (_, was), (_, view) in zip(old, new, strict=True):
                if was in state:
                    state[view] = state.pop(was)
        for i, group in enumerate(self.inner.param_groups):
            group["params"] = self._inner_group(i)["params"]

    def _update_buckets(self, present: Sequence[bool], kwargs: Options) -> None:
        """Bucket after bucket: while one is updated, the next are averaged and the last are gathered."""
        used = [i for i, bucket in enumerate(self.pieces.buckets) if any(present[item] for item in bucket.items)]
        averaged: deque[Begun] = deque()
        gathered: deque[Callable[[], None]] = deque()
        for turn, i in enumerate(used):
            while len(averaged) <= AHEAD and turn + len(averaged) < len(used):
                averaged.append(self._reduce(used[turn + len(averaged)]))
            self._run(i, averaged.popleft()(), present, kwargs)
            gathered.append(self._gather(i))
            if len(gathered) > AHEAD:
                gathered.popleft()()
        for wait in gathered:
            wait()

    def _update_wholes(self, present: Sequence[bool], kwargs: Options) -> None:
        """All parameters at once, since what is not known to be pointwise may look at all of them."""
        used = [i for i, bucket in enumerate(self.pieces.buckets) if any(present[item] for item in bucket.items)]
        averaged = [self._reduce(i) for i in used]
        for i, wait in zip(used, averaged, strict=True):
            self._give(i, wait(), present)
        for group, mine in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update(_options(group))
        unhooked(type(self.inner))(self.inner, **kwargs)
        for group, mine in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_options(mine))
            for view in mine["params"]:
                view.grad = None
        for wait in [self._gather(i) for i in used]:
            wait()

    def _reduce(self, i: int) -> Begun:
        bucket = self.pieces.buckets[i]
        sources = [self._gradient(piece.item, piece.begin, piece.end) for piece in bucket.pieces]
        like = self.pieces.parameters[bucket.items[0]].detach()
        if self.gradients == "same":
            return lambda: self.exchange.own(bucket, sources, like)
        return self.exchange.reduce(bucket, sources, like)

    def _gradient(self, item: int, begin: int, end: int) -> Tensor | None:
        parameter = self.pieces.parameters[item]
        if parameter.grad is None:
            return None
        return in_order_of(parameter.grad, parameter)[begin:end]

    def _give(self, i: int, part: Tensor, present: Sequence[bool]) -> None:
        """Let the pieces of a bucket have their gradients."""
        bucket = self.pieces.buckets[i]
        for piece, view in self.pieces.own[i]:
            if present[piece.item]:
                taken = part[place(piece, bucket)]
                view.grad = _shaped(taken, view)

    def _run(self, i: int, part: Tensor, present: Sequence[bool], kwargs: Options) -> None:
        """Update the pieces of a bucket."""
        self._give(i, part, present)
        group = self.param_groups[self.group_of[self.pieces.buckets[i].items[0]]]
        groups = self.inner.param_groups
        views = [view for piece, view in self.pieces.own[i] if present[piece.item]]
        given = {**_options(group), "params": views}
        self.inner.param_groups = [given]
        try:
            if views:
                unhooked(type(self.inner))(self.inner, **kwargs)
            group.update(_options(given))
        finally:
            self.inner.param_groups = groups
            for view in views:
                view.grad = None

    def _gather(self, i: int) -> Callable[[], None]:
        bucket = self.pieces.buckets[i]
        views = []
        for piece in bucket.pieces:
            parameter = self.pieces.parameters[piece.item]
            views.append(flat(parameter)[piece.begin : piece.end] if is_dense(parameter) else parameter.detach())
        return self.exchange.gather(bucket, views)


def _ready(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if not dist.is_available() or not dist.is_initialized():
        call = 'torch.distributed.init_process_group("gloo")  # "nccl" with GPUs'
        raise ShardError(f"there is no process group to spread over: start with torchrun, and call {call} before")
    if group is not None and dist.get_rank(group) < 0:
        raise ShardError(f"rank {dist.get_rank()} is not in the group; build the optimizer on the group's ranks alone")
    return group


def _groups(params: Iterable[Any]) -> list[Options]:
    """The caller's groups, copied."""
    if isinstance(params, Tensor):
        raise TypeError("params is a tensor; give an iterable of tensors or dicts")
    given = list(params)
    if not given:
        raise ValueError("optimizer got an empty parameter list")
    return [_copied(group) for group in given] if isinstance(given[0], dict) else [{"params": given}]


def _copied(group: Options) -> Options:
    params = group["params"]
    if isinstance(params, Tensor):
        params = [params]
    return {**group, "params": params if isinstance(params, set) else list(params)}


def _stand_ins(kind: type[optim.Optimizer], groups: Sequence[Options]) -> list[Options]:
    """Groups with which an optimizer can be made that checks its options, and takes no memory."""
    if kind not in POINTWISE:
        return [_copied(group) for group in groups]
    return [{**group, "params": [_stand_in(p) for p in group["params"]]} for group in groups]


def _stand_in(parameter: Any) -> Any:
    if isinstance(parameter, tuple):
        return (parameter[0], _stand_in(parameter[1]))
    return parameter.detach().new_empty(0) if isinstance(parameter, Tensor) else parameter


def _item(p: Tensor, kind: int, is_cut: bool) -> Item:
    whole = not is_cut or not is_dense(p) or p.is_complex()
    return Item(p.numel(), p.element_size(), kind, whole, 1 if p.dtype in EXACT else VECTOR)


def _options(group: Options) -> Options:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _shaped(taken: Tensor, view: Tensor) -> Tensor:
    """A flat gradient in the shape and order of what it belongs to."""
    return (
        taken.as_strided(view.shape, view.stride(), taken.storage_offset())
        if is_dense(view)
        else taken.view(view.shape)
    )
