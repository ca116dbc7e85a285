"""Objects of torch that a module keeps, attributes of its tensors, and what containers hide."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, optim
from torch.distributions import Normal
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DistributedSampler

from .way import Settings, of, on_module, prepared, setting


def kept(make: Callable[[], Any], read: Callable[[Any, Any], Any], change: Callable[[Any], Any]) -> Any:
    """Return a way whose module keeps something, which forward multiplies with."""
    then = prepared(lambda m, x: x * read(m, m.kept), lambda m: setattr(m, "kept", make()))
    return then, on_module(lambda m: [change(m.kept), None][1])


def an_optimizer() -> optim.SGD:
    parameter = torch.zeros(1, requires_grad=True)
    return optim.SGD([parameter], lr=0.5)


class Warming(LRScheduler):
    """Has an attribute of its own."""

    factor = 2

    def get_lr(self) -> list[float | Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


class Kind(enum.Enum):
    table = {"scale": 2}  # noqa: RUF012 # its value, which changes


def stepped(scheduler: LRScheduler) -> None:
    scheduler.optimizer.step()
    scheduler.step()


@of("torch's objects")
def _() -> Any:
    """`scheduler.last_epoch` in an attribute"""
    return kept(lambda: StepLR(an_optimizer(), 1), lambda m, it: 1 + it.last_epoch, stepped)


@of("torch's objects")
def _() -> Any:
    """`scheduler.get_last_lr()` in an attribute"""
    return kept(lambda: StepLR(an_optimizer(), 1), lambda m, it: it.get_last_lr()[0], stepped)


@of("torch's objects")
def _() -> Any:
    """an attribute of one's own scheduler"""
    return kept(lambda: Warming(an_optimizer()), lambda m, it: it.factor, lambda it: setattr(it, "factor", 3))


@of("torch's objects")
def _() -> Any:
    """`optimizer.defaults`"""
    return kept(an_optimizer, lambda m, it: it.defaults["lr"], lambda it: it.defaults.update(lr=0.25))


@of("torch's objects")
def _() -> Any:
    """the mean of a distribution"""
    return kept(
        lambda: Normal(torch.tensor(2.0), 1.0), lambda m, it: it.mean, lambda it: setattr(it, "loc", torch.tensor(3.0))
    )


@of("torch's objects")
def _() -> Any:
    """the epoch of a sampler"""
    return kept(lambda: DistributedSampler(range(8), 1, 0), lambda m, it: 1 + it.epoch, lambda it: it.set_epoch(3))  # type: ignore[arg-type]


@of("torch's objects")
def _() -> Any:
    """an attribute of a parameter"""
    then = prepared(lambda m, x: x * m.linear.weight.factor, lambda m: setattr(m.linear.weight, "factor", 2.0))
    return then, on_module(lambda m: setattr(m.linear.weight, "factor", 3.0))


@of("torch's objects")
def _() -> Any:
    """an attribute that a parameter gets"""
    return lambda m, x: x * getattr(m.linear.weight, "gain", 2.0), on_module(
        lambda m: setattr(m.linear.weight, "gain", 3.0)
    )


@of("torch's objects")
def _() -> Any:
    """an attribute of a parameter that forward sets"""

    def then(m: Any, x: Tensor) -> Tensor:
        m.linear.weight.calls = getattr(m.linear.weight, "calls", 0) + 1
        return x * m.linear.weight.calls

    return then, lambda: None


@of("containers")
def _() -> Any:
    """an object in a set"""
    return kept(
        lambda: {Settings()}, lambda m, it: sum(each.scale for each in it), lambda it: setattr(min(it), "scale", 3)
    )


@of("containers")
def _() -> Any:
    """an object that is a key"""
    return kept(
        lambda: {Settings(): 1}, lambda m, it: sum(each.scale for each in it), lambda it: setattr(min(it), "scale", 3)
    )


@of("containers")
def _() -> Any:
    """the value of a member of an enum"""
    Kind.table.value["scale"] = 2
    return kept(lambda: Kind.table, lambda m, it: it.value["scale"], lambda it: it.value.update(scale=3))


@of("containers")
def _() -> Any:
    """a dict behind its bound method"""
    return kept(lambda: {"a": 2}.get, lambda m, it: it("a"), lambda it: it.__self__.update(a=3))


@of("containers")
def _() -> Any:
    """a dict in an array of objects"""
    return kept(lambda: np.array([{"a": 2}], dtype=object), lambda m, it: it[0]["a"], lambda it: it[0].update(a=3))


@of("containers")
def _() -> Any:
    """the arguments of an exception"""
    return kept(lambda: ValueError(2), lambda m, it: it.args[0], lambda it: setattr(it, "args", (3,)))


AFFINE = torch.distributions.transforms.AffineTransform(1.0, 2.0)


@of("torch's objects")
def _() -> Any:
    """a transform of a distribution"""
    return lambda m, x: AFFINE(x), setting(AFFINE, "scale", 3.0)


@of("torch's objects")
def _() -> Any:
    """an option of the hook of `torch.nn.utils.spectral_norm`"""

    def prepare(m: Any) -> None:
        m.normed = torch.nn.utils.spectral_norm(torch.nn.Linear(8, 8))

    def change(m: Any) -> None:
        next(iter(m.normed._forward_pre_hooks.values())).eps = 0.5

    def then(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():  # so that each step begins with the same vectors
            m.normed.weight_u.copy_(torch.linspace(0.1, 1, 8))
            m.normed.weight_v.copy_(torch.linspace(0.1, 1, 8))
        return m.normed(x)

    return prepared(then, prepare), on_module(change)
