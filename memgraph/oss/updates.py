"""The update of a step: gradients averaged, pieces updated, parameters gathered, bucket by bucket.

    bucket 0    reduce ......... update gather .........
    bucket 1         reduce ......... update gather .........
    bucket 2              reduce ......... update gather .........

While a bucket is updated, the next ones are averaged and the last ones are gathered. An optimizer that is not known to
be pointwise may look at all its parameters at once: it is run when all gradients are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import ShardError
from ..pointwise import unhooked
from .groups import Group, options
from .pieces import Laid

if TYPE_CHECKING:
    from .optimizer import OSS

AHEAD = 2  # buckets that are averaged, and that are gathered, while one is updated
Gradients = Callable[[], list[Tensor]]  # waits; one for each of the own pieces of a bucket


class Updates:
    """How one optimizer runs its steps."""

    def __init__(self, optimizer: OSS) -> None:
        self.optimizer = optimizer

    def run(self, kinds: Sequence[int], kwargs: Group, loss: Any) -> None:
        """Update all parameters of which some rank has a gradient."""
        used = [laid for laid in self.optimizer.pieces.laid if any(kinds[item] for item in laid.bucket.items)]
        if self.optimizer.is_cut:
            self._by_bucket(used, kinds, kwargs)
        else:
            self._at_once(used, kinds, kwargs, loss)

    def averaged(self, laid: Laid) -> Gradients:
        """Begin to average the gradients of a bucket."""
        optimizer = self.optimizer
        sources = optimizer.pieces.sources(laid)
        if optimizer.gradients == "same":
            return lambda: laid.gradients(sources[optimizer.exchange.rank])
        wait = optimizer.exchange.reduce(laid.bucket, sources)
        return lambda: laid.gradients(wait())

    def _by_bucket(self, used: Sequence[Laid], kinds: Sequence[int], kwargs: Group) -> None:
        coming: deque[Gradients] = deque()
        going: deque[Callable[[], None]] = deque()
        for turn, laid in enumerate(used):
            coming += map(self.averaged, used[turn + len(coming) : turn + 1 + AHEAD])
            self._update(laid, coming.popleft()(), kinds, kwargs)
            going.append(self._gathered(laid))
            if len(going) > AHEAD:
                going.popleft()()
        for wait in going:
            wait()

    def _at_once(self, used: Sequence[Laid], kinds: Sequence[int], kwargs: Group, loss: Any) -> None:
        optimizer = self.optimizer
        for laid, wait in [(laid, self.averaged(laid)) for laid in used]:
            _give(laid, wait(), kinds)
        given = [options(group) | {"params": mine["params"]} for group, mine in self._groups()]
        if loss is not None:
            kwargs = {**kwargs, "closure": once(loss)}
        self._step(given, kwargs)
        for (group, _), now in zip(self._groups(), given, strict=True):
            group.update(options(now))
        for wait_for in [self._gathered(laid) for laid in used]:
            wait_for()
        assert optimizer.inner is not None

    def _groups(self) -> list[tuple[Group, Group]]:
        """Each group, with that of the optimizer that runs on pieces."""
        return list(zip(self.optimizer.param_groups, self.optimizer.inner.param_groups, strict=True))

    def _update(self, laid: Laid, gradients: Sequence[Tensor], kinds: Sequence[int], kwargs: Group) -> None:
        """Update the own pieces of a bucket, which are all of one group."""
        optimizer = self.optimizer
        views = _give(laid, gradients, kinds)
        group = optimizer.param_groups[optimizer.group_of[laid.bucket.items[0]]]
        given = options(group) | {"params": views}
        if views:
            self._step([given], kwargs)
        group.update(options(given))

    def _step(self, groups: list[Group], kwargs: Group) -> None:
        """Run the caller's own optimizer on these groups."""
        inner = self.optimizer.inner
        before, inner.param_groups = inner.param_groups, groups
        try:
            unhooked(type(inner))(inner, **kwargs)
        finally:
            inner.param_groups = before
            for group in groups:
                for view in group["params"]:
                    view.grad = None

    def _gathered(self, laid: Laid) -> Callable[[], None]:
        return self.optimizer.exchange.gather(laid.bucket, laid.views)


def _give(laid: Laid, gradients: Sequence[Tensor], kinds: Sequence[int]) -> list[Tensor]:
    """Let the own pieces of a bucket have their gradients; returns those that have one."""
    given = []
    for (piece, view), gradient in zip(laid.own, gradients, strict=True):
        if kinds[piece.item]:
            view.grad = gradient
            given.append(view)
    return given


def once(loss: Any) -> Callable[[], Any]:
    """A closure that has been evaluated, for an optimizer that does so once."""
    asked = []

    def closure() -> Any:
        asked.append(loss)
        if len(asked) > 1:
            raise ShardError("an optimizer other than LBFGS evaluates its closure twice, which can't be sharded")
        return loss

    return closure
