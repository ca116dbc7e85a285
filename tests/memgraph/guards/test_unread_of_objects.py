"""An attribute of an object in an attribute is a fact of a call if code that ran names it, and no other is."""

from __future__ import annotations

import abc
import copy
import dataclasses
import logging
import operator
import pickle
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

import memgraph

X = torch.ones(2, 4)
T = TypeVar("T")
GET, GETATTR, VARS, FIELD = operator.attrgetter("unread"), getattr, vars, "{0.unread}"


class Trainer(abc.ABC, Generic[T]):
    """Has what a loop has; `late` is not there at first."""

    def __init__(self) -> None:
        self.steps, self.epoch, self.factor, self.mean = 0, 0, 1.0, 0.0
        self.config = Config()

    def scale(self) -> float:
        return self.epoch + self.config.scale

    @property
    def doubled(self) -> float:
        return 2 * self.factor


@dataclasses.dataclass
class Config:
    """Is compared, printed and copied by code that dataclasses write."""

    scale: int = 2
    unread: int = 0
    got = property(operator.attrgetter("unread"))

    def __getstate__(self) -> Any:
        return dict(self.__dict__)


class Reading(nn.Linear):
    """Scales its result by what a function reads of an object in an attribute."""

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__(4, 4)
        self.read = read
        self.trainer: Any = Trainer()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.read(self.trainer)


class Noting(nn.Linear):
    """Writes to an object what it never reads."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.trainer: Any = Trainer()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.trainer.mean = y.mean().item()
        return y


def outcome(module: Any, change: Callable[[Any, int], object], caplog: pytest.LogCaptureFixture) -> int:
    """Return how often calls are captured, whose results have to be eager's."""
    plain = copy.deepcopy(module)
    model = memgraph.compile(module, "1GB", time_limit=0)
    with caplog.at_level(logging.INFO, "memgraph"):
        for step in range(6):
            for each in (plain, module):
                change(each.trainer, step)
                each.zero_grad()
            ours, theirs = model(X), plain(X)
            ours.sum().backward()
            theirs.sum().backward()
            assert torch.equal(ours, theirs)
            assert torch.equal(plain.weight.grad, module.weight.grad)
            assert plain.trainer.mean == module.trainer.mean
    return sum("is captured, priced and planned" in record.getMessage() for record in caplog.records)


def step_and(name: str, value: Callable[[int], Any], of: str = "") -> Callable[[Any, int], None]:
    def change(trainer: Any, step: int) -> None:
        trainer.steps = trainer.config.unread = step
        setattr(getattr(trainer, of) if of else trainer, name, value(step))

    return change


def later(trainer: Any) -> float:
    """Is entered by some calls alone."""
    return trainer.steps + getattr(trainer, "late", 1)


def count(trainer: Any, step: int) -> None:
    trainer.steps, trainer.epoch = step, step // 3
    if step == 5:
        trainer.late, trainer.steps = 7, 4  # a step as the one before it, but for what has come


READS: dict[str, tuple[Callable[[Any], float], Callable[[Any, int], object], int]] = {
    "a method": (lambda t: t.scale(), step_and("epoch", lambda step: step // 3), 2),
    "a property": (lambda t: t.doubled, step_and("factor", lambda step: 1.0 + step), 2),
    "nothing else": (lambda t: t.config.scale, step_and("epoch", lambda step: step), 1),
    "a field": (lambda t: t.config.scale, step_and("scale", lambda step: step // 3, "config"), 2),
    "an attribute that comes": (lambda t: getattr(t, "late", 1), step_and("late", lambda step: 2), 1),
    "one that a branch reads": (
        lambda t: t.steps if t.epoch else 1,
        step_and("epoch", lambda step: min(step // 3, 1)),
        4,
    ),
    "what a function in a branch reads": (lambda t: later(t) if t.epoch else 1, count, 4),
    "one that comes, in a branch": (
        lambda t: getattr(t, "late", 1) if t.epoch else 1,
        lambda t, step: setattr(t, "late" if step > 3 else "epoch", step),
        6,
    ),
}
WHOLE: dict[str, Callable[[Any], float]] = {
    "==": lambda t: 2.0 if t.config == Config(2, 1) else 3.0,
    "repr": lambda t: float(len(repr(t.config))),
    "hash": lambda t: float(hash((t.config.scale, t.config.unread))),
    "replace": lambda t: dataclasses.replace(t.config, scale=1).unread,
    "astuple": lambda t: sum(dataclasses.astuple(t.config)),
    "asdict": lambda t: sum(dataclasses.asdict(t.config).values()),
    "copy": lambda t: copy.copy(t.config).unread,
    "vars": lambda t: sum(vars(t.config).values()),
    "attrgetter": lambda t: GET(t.config),
    "a property of a getter": lambda t: t.config.got,
    "getattr by another name": lambda t: GETATTR(t.config, "un" + "read"),
    "vars by another name": lambda t: VARS(t.config)["un" + "read"],
    "format": lambda t: float(FIELD.format(t.config)),
    "pickle": lambda t: float(len(pickle.dumps(t.config))),
    "__getstate__": lambda t: sum(t.config.__getstate__().values()),
    "object.__getattribute__": lambda t: object.__getattribute__(t.config, "un" + "read"),
    "deepcopy": lambda t: GET(copy.deepcopy(t.config)),
    "fields": lambda t: sum(getattr(t.config, field.name) for field in dataclasses.fields(t.config)),
}


@pytest.mark.parametrize("name", READS)
def test_what_is_named_counts_and_nothing_else(name: str, caplog: pytest.LogCaptureFixture) -> None:
    read, change, captures = READS[name]
    assert outcome(Reading(read), change, caplog) == captures


@pytest.mark.long
@pytest.mark.parametrize("name", WHOLE)
def test_code_that_reads_all_of_an_object_reads_each_attribute(name: str, caplog: pytest.LogCaptureFixture) -> None:
    outcome(Reading(WHOLE[name]), step_and("unread", lambda step: 10**step, "config"), caplog)


def test_what_forward_writes_and_never_reads_is_no_fact(caplog: pytest.LogCaptureFixture) -> None:
    assert outcome(Noting(), lambda trainer, step: None, caplog) == 1


class Sealed(type):
    """Refuses to set attributes of its classes."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError("sealed")


class Fixed(metaclass=Sealed):
    """Is of such a class."""

    def __init__(self) -> None:
        self.scale, self.mean = 2, 0.0


def test_all_of_an_object_counts_whose_class_can_tell_nothing(caplog: pytest.LogCaptureFixture) -> None:
    module = Reading(lambda t: t.scale)
    module.trainer = Fixed()
    assert outcome(module, lambda trainer, step: setattr(trainer, "scale", step // 3), caplog) == 2


def test_classes_are_as_they_were_after_a_capture() -> None:
    memgraph.compile(module := Reading(lambda t: t.scale()), "1GB", time_limit=0)(X)
    assert all("__getattribute__" not in vars(kind) for kind in (Trainer, Config, nn.Module))
    assert module.trainer.scale() == 2
