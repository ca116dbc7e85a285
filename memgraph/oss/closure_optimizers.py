"""A step that evaluates its closure as often as it likes (LBFGS): one rank steps, and tells the others when.

rank 0                                   others
LBFGS.step(evaluate)                     until rank 0 has stepped:
  evaluate: parameters to all,             parameters from rank 0,
            closure, gradients averaged    closure, gradients to rank 0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CollectiveError, ShardError
from ..optim.elementwise import unhooked_step
from .comm.failures import failures, in_words
from .grad_presence import exchange_presence
from .step import FAILURE

if TYPE_CHECKING:
    from .optimizer import OSS

STEPPED, EVALUATE, FAILED = 1, 2, 3  # what rank 0 says; the others say 0


class AllRanksFailed(Exception):
    """All ranks have failed in the same evaluation, this one with `error`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def step_with_closure(optimizer: OSS, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
    """Step on rank 0, and evaluate on all; returns what the first evaluation returned here.

    Raises:
        ShardError: rank 0, or the closure on another rank, failed. Parameters are where the search had come to, the
            same on all ranks.
    """
    losses: list[Any] = []
    exchange = optimizer.exchange

    def said(word: int) -> int:
        return int(exchange.most(exchange.numbers([word], torch.int32, optimizer.pieces.device)))

    def loss() -> Any:
        if closure is None:
            raise TypeError(f"{optimizer.optim.__name__} evaluates the loss again and again; call step(closure)")
        found = closure()
        float(found.detach() if isinstance(found, Tensor) else found)  # as LBFGS does, but where all ranks are told
        return found

    def evaluate() -> Tensor:
        said(EVALUATE)
        return _evaluate(optimizer, loss, losses)

    if exchange.rank == 0:
        _lead(optimizer, evaluate, said, kwargs)
    else:
        while (word := said(0)) == EVALUATE:
            try:
                _evaluate(optimizer, loss, losses)
            except AllRanksFailed as failed:
                raise failed.error from None
        if word == FAILED:
            told = failures(optimizer.watch, None, FAILURE)
            _spread(optimizer)
            raise ShardError(f"the step has failed on another rank: {in_words(told)}")
    _spread(optimizer)
    return losses[0] if losses else None


def _lead(optimizer: OSS, evaluate: Callable[[], Tensor], said: Callable[[int], int], kwargs: dict[str, Any]) -> None:
    inner = optimizer.inner
    inner.param_groups[0].update({k: v for k, v in optimizer.param_groups[0].items() if k in inner.defaults})
    try:
        unhooked_step(type(inner))(inner, closure=evaluate, **kwargs)
    except AllRanksFailed as failed:
        raise failed.error from None
    except CollectiveError:  # nobody can be told anything
        raise
    except BaseException as error:
        said(FAILED)
        failures(optimizer.watch, error, FAILURE)
        _spread(optimizer)
        raise
    finally:
        for view in inner.param_groups[0]["params"]:
            view.grad = None
    said(STEPPED)


def _evaluate(optimizer: OSS, closure: Callable[[], Any], losses: list[Any]) -> Tensor:
    """The closure's loss, the mean of all ranks, with gradients where rank 0 wants them."""
    with torch.no_grad():
        if losses:
            _spread(optimizer)
        loss, trouble = optimizer.prepare(closure)
        losses.append(loss)
        try:
            kinds, _ = exchange_presence(optimizer.exchange, optimizer.pieces, optimizer.param_groups, trouble, {})
        except BaseException as error:
            raise AllRanksFailed(error) from error
        optimizer.inside.kinds = kinds
        optimizer.averages.give(kinds)
        optimizer.held = None
        return optimizer.exchange.mean(torch.as_tensor(loss))


def _spread(optimizer: OSS) -> None:
    """The parameters of rank 0, to all."""
    exact = optimizer.exchange.exact()  # a search along a line is lost in what rounding changes
    for wait in [exact.gather(laid.bucket, laid.views) for laid in optimizer.pieces.laid]:
        wait()
