"""Variables outside of attributes that forward reads take effect when they change, and others cost no capture."""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import logging
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memgraph
from memgraph.capture.capture import capture
from memgraph.guards.attribute_guard import AttributeGuard
from memgraph.guards.contents import STATES, state_contents
from memgraph.guards.variable_guard import VariableWalk

NUMBER, NAME, ACTIVATION, MASK = 1, "a", torch.relu, torch.ones(8)
BETA = 0.5
TABLE, NUMBERS = {"scale": 1}, [1, 2]
OPTIONS = types.SimpleNamespace(alpha=1.0)
step, loss = 0, torch.ones(1)
ARGS = argparse.Namespace(scale=1)
CONFIG = types.SimpleNamespace(model=types.SimpleNamespace(scale=1))
CACHE: dict[str, float] = {}
COUNTED = 0


class Settings:
    def __init__(self, scale: int) -> None:
        self.scale, self.seen = scale, 0

    def doubled(self) -> int:
        return 2 * self.scale


class Shared:
    """Eager's copy of a model refers to the same one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class Trainer(Shared):
    def __init__(self) -> None:
        self.beta = 1

    def scaled(self, y: Tensor) -> Tensor:
        return y * self.beta

    def total(self, y: Tensor) -> Tensor:
        return self.scaled(y).sum()


class Criterion(Shared, nn.CrossEntropyLoss):
    pass


class Base:
    base_scale = 1


class Derived(Base):
    pass


def scaled(y: Tensor) -> Tensor:
    return y * NUMBER


def calling(function: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda part, x: function(part.linear(x))


TRAINER, CRITERION, CLOSED_OVER_CODE = Trainer(), Criterion(weight=torch.ones(8)), calling(scaled)


class OwnDict(dict[str, int]):
    pass


SETTINGS, OWN = Settings(1), OwnDict(scale=1)
DOUBLED = (Settings.doubled, lambda settings: 3)


def penalty() -> None:
    globals()["COUNTED"] = COUNTED + 1


class Reading(nn.Module):
    """Its forward is a function of this file; it has attributes of the names of globals."""

    scale = 1

    def __init__(self, then: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.then = then
        self.step = self.loss = 2
        self.held, self.bound, self.method = scaled, functools.partial(scaled), TRAINER.scaled
        self.criteria = [CRITERION]

    def forward(self, x: Tensor) -> Any:
        return self.then(self, x)


def set_global(name: str, *values: Any) -> Callable[[int], None]:
    def change(i: int) -> None:
        globals()[name] = values[i % len(values)]

    return change


def closed_over() -> tuple[Callable[[Any, Tensor], Tensor], Callable[[int], None]]:
    scale, table = 1.0, {"scale": 1}

    def change(i: int) -> None:
        nonlocal scale
        scale, table["scale"] = 1.0 + i, i

    return lambda part, x: part.linear(x) * scale * table["scale"], change


CLOSED, CHANGE_CLOSED = closed_over()
READS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[int], Any]]] = {
    "an int": (lambda part, x: part.linear(x) * NUMBER, set_global("NUMBER", 1, 2, 3)),
    "a branch": (lambda part, x: part.linear(x) if NUMBER < 2 else x + part.linear(x), set_global("NUMBER", 1, 2, 3)),
    "a text": (lambda part, x: part.linear(x) * len(NAME), set_global("NAME", "a", "bc")),
    "a function": (lambda part, x: ACTIVATION(part.linear(x)), set_global("ACTIVATION", torch.relu, torch.tanh, F.gelu)),
    "a tensor": (lambda part, x: part.linear(x) * MASK, set_global("MASK", torch.ones(8), torch.arange(8.0))),
    "a dict": (lambda part, x: part.linear(x) * TABLE["scale"], lambda i: TABLE.update(scale=i)),
    "a list": (lambda part, x: part.linear(x) * sum(NUMBERS), lambda i: NUMBERS.append(i)),
    "a class attribute": (lambda part, x: part.linear(x) * part.scale, lambda i: setattr(Reading, "scale", i + 1)),
    "a closure": (CLOSED, CHANGE_CLOSED),
    "a float": (lambda part, x: part.linear(x) * BETA, set_global("BETA", 0.5, 0.7, 0.9)),
    "a float that is compared": (lambda part, x: part.linear(x) * (BETA > 0.6), set_global("BETA", 0.5, 0.7, 0.9)),
    "a float whose type is asked": (
        lambda part, x: part.linear(x) * (BETA if type(BETA) is float else 9.0), set_global("BETA", 0.5, 0.7, 0.9)
    ),
    "an argument of the command line": (
        lambda part, x: part.linear(x) * ARGS.scale, lambda i: setattr(ARGS, "scale", i)
    ),
    "a nested configuration": (
        lambda part, x: part.linear(x) * CONFIG.model.scale, lambda i: setattr(CONFIG.model, "scale", i)
    ),
    "an object that is replaced, and then changes": (
        lambda part, x: part.linear(x) * SETTINGS.scale,
        lambda i: setattr(SETTINGS, "scale", i) if i % 2 else globals().update(SETTINGS=Settings(i)),
    ),
    "what a method of an object reads": (
        lambda part, x: part.linear(x) * SETTINGS.doubled(), lambda i: setattr(SETTINGS, "scale", i)
    ),
    "a dict of a class of its own": (lambda part, x: part.linear(x) * OWN["scale"], lambda i: OWN.update(scale=i)),
    "a method that is replaced": (
        lambda part, x: part.linear(x) * SETTINGS.doubled(), lambda i: setattr(Settings, "doubled", DOUBLED[i % 2])
    ),
    "what a function of the file reads that an attribute holds": (
        lambda part, x: part.held(part.linear(x)), set_global("NUMBER", 1, 2, 3)
    ),
    "what a function in a partial reads": (
        lambda part, x: part.bound(part.linear(x)), set_global("NUMBER", 1, 2, 3)
    ),
    "what a function in a closure reads": (CLOSED_OVER_CODE, set_global("NUMBER", 1, 2, 3)),
    "what a bound method reads of its object": (
        lambda part, x: part.method(part.linear(x)), lambda i: setattr(TRAINER, "beta", i)
    ),
    "an attribute of a base of a class": (
        lambda part, x: part.linear(x) * Derived.base_scale, lambda i: setattr(Base, "base_scale", i + 1)
    ),
    "a buffer of a module that is no submodule": (
        lambda part, x: part.criteria[0](part.linear(x), torch.arange(4)),
        lambda i: setattr(CRITERION, "weight", torch.linspace(1.0, 1.0 + i, 8)),
    ),
    "an attribute of an object": (
        lambda part, x: part.linear(x) * OPTIONS.alpha, lambda i: setattr(OPTIONS, "alpha", 1.0 + i)
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def same_globals() -> Iterator[None]:
    names = (
        "NUMBER", "NAME", "ACTIVATION", "MASK", "BETA", "TABLE", "NUMBERS", "OPTIONS", "step", "loss", "CACHE", "ARGS",
        "CONFIG", "SETTINGS", "OWN", "COUNTED",
    )  # fmt: skip
    before = {name: copy.deepcopy(globals()[name]) for name in names}
    yield
    globals().update(before)
    Reading.scale, Settings.doubled = 1, DOUBLED[0]  # type: ignore[method-assign]


def wrong_steps(module: nn.Module, compiled: nn.Module, change: Callable[[int], Any], steps: int = 6) -> list[int]:
    """Train beside eager, with a change before each step; return the steps with other gradients."""
    eager, wrong = copy.deepcopy(module), list[int]()
    for i in [*range(steps), 0]:
        change(i)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
        for each in (compiled, eager):
            each.zero_grad()
            each(x).square().sum().backward()
        pairs = zip(module.parameters(), eager.parameters(), strict=True)
        if not all(torch.equal(a.grad, b.grad) for a, b in pairs):  # type: ignore[arg-type]
            wrong.append(i)
    return wrong


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*were each captured")
@pytest.mark.parametrize("what", READS)
def test_what_forward_reads_takes_effect_when_it_changes(what: str) -> None:
    then, change = READS[what]
    module = Reading(then)
    assert wrong_steps(module, memgraph.compile(module, "1GB"), change) == []


@pytest.mark.parametrize("what", ["a float", "an attribute of an object"])
def test_a_float_is_an_input_from_its_second_value_on(what: str, planned: list[str]) -> None:
    then, change = READS[what]
    module = Reading(then)
    wrong_steps(module, memgraph.compile(module, "1GB"), change)
    assert len(planned) == 2


def test_globals_with_the_names_of_attributes_cost_no_capture(planned: list[str]) -> None:
    def change(i: int) -> None:
        globals().update(step=i, loss=torch.ones(1) * i)

    module = Reading(lambda part, x: part.linear(x) * part.step * part.loss * len(x))
    assert wrong_steps(module, memgraph.compile(module, "1GB"), change) == []
    assert len(planned) == 1


def test_what_code_does_not_read_of_an_object_costs_no_capture(planned: list[str]) -> None:
    module = Reading(lambda part, x: part.linear(x) * SETTINGS.scale * getattr(part, "seen", 1))
    assert wrong_steps(module, memgraph.compile(module, "1GB"), lambda i: setattr(SETTINGS, "seen", i)) == []
    assert len(planned) == 1


def test_a_function_with_the_name_of_an_attribute_costs_no_capture(planned: list[str]) -> None:
    module = Reading(lambda part, x: part.linear(x) * part.penalty)
    module.penalty = 2.0  # type: ignore[assignment]
    assert wrong_steps(module, memgraph.compile(module, "1GB"), lambda i: penalty()) == []
    assert len(planned) == 1


def test_a_cache_is_filled_as_in_eager_and_costs_no_capture_when_it_is_full(planned: list[str]) -> None:
    def then(part: Any, x: Tensor) -> Any:
        return part.linear(x) * CACHE.setdefault(f"{x.shape[0]} rows", 2.0)

    module = Reading(then)
    compiled = memgraph.compile(module, "1GB")
    for rows in (4, 4, 3, 4, 3, 4, 3):
        compiled(torch.ones(rows, 8)).sum().backward()
        module.zero_grad()
    assert CACHE == {"4 rows": 2.0, "3 rows": 2.0}
    assert len(planned) == 3  # one for each kind, and one for the first kind beside the entry of the second


def test_the_warning_names_the_variable() -> None:
    then, _ = READS["an int"]
    compiled = memgraph.compile(Reading(then), "1GB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(8):
            globals()["NUMBER"] = i
            compiled(torch.ones(2, 8)).sum().backward()
    assert [str(each.message) for each in caught if "test_variable_guard.NUMBER differs each time" in str(each.message)]


def test_a_number_in_an_installed_package_is_read() -> None:
    package = types.ModuleType("installed_package")
    package.__file__ = "/lib/site-packages/installed_package/__init__.py"
    exec(
        "from torch import nn\nSCALE = 1\nTABLE = {}\n"
        "class Layer(nn.Linear):\n    def forward(self, x):\n        return super().forward(x) * SCALE",
        vars(package),
    )
    sys.modules["installed_package"] = package
    try:
        module = vars(package)["Layer"](8, 8)
        assert wrong_steps(module, memgraph.compile(module, "1GB"), lambda i: setattr(package, "SCALE", i % 2)) == []
    finally:
        del sys.modules["installed_package"]


def guard_of(module: nn.Module) -> AttributeGuard:
    """Return the guard of a module that has run once."""
    attributes = AttributeGuard(module)
    attributes.grow(capture(module, (torch.ones(2, 8),), {}).reads)
    return attributes


class Meta(type):
    pass


class OfMeta(metaclass=Meta):
    scale = 2


def test_a_class_with_a_metaclass_is_the_same_for_each_walk() -> None:
    def scaled(part: Any, x: Tensor) -> Tensor:
        return part.linear(x) * (OfMeta.scale if issubclass(OfMeta, object) else 1)

    guard = guard_of(Reading(scaled)).variables
    (before,) = guard.walks
    kept = [vars(OfMeta) for _ in range(9)]  # a class makes another of these each time, at any address
    assert not before.is_stale() and kept
    assert VariableWalk(before.reads, {}).group == before.group


def test_a_tensor_among_the_globals_is_not_kept_alive() -> None:
    module = Reading(lambda part, x: part.linear(x) * MASK)
    attributes = guard_of(module)
    before, reference = attributes.groups, weakref.ref(MASK)
    globals()["MASK"] = None
    gc.collect()
    assert reference() is None and attributes.groups != before


def test_equal_values_are_the_same_key() -> None:
    attributes = guard_of(Reading(lambda part, x: part.linear(x) * NUMBERS[0] * len(NAME)))
    before = attributes.groups
    globals().update(NUMBERS=[1, 2], NAME="".join(["a"]))
    assert attributes.groups == before
    globals().update(NUMBERS=[1, 2.0])
    assert attributes.groups != before


@pytest.mark.filterwarnings("ignore:.*were each captured")
def test_what_a_loss_reads_takes_effect_when_it_changes() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = CRITERION

        def forward(self, y: Tensor) -> Tensor:
            return self.inner(y, torch.arange(4)) * NUMBER

    losses: list[Callable[[Tensor], Tensor]] = [lambda y: TRAINER.scaled(y).sum(), Whole()]
    for given in (*losses, TRAINER.total):
        module, x = nn.Linear(8, 8), torch.randn(4, 8)
        compiled = memgraph.compile(module, "1GB", loss=given)
        for i in (1, 2, 3, 1):
            TRAINER.beta, CRITERION.weight = i, torch.linspace(1.0, i, 8)
            globals()["NUMBER"] = i
            assert torch.equal(compiled(x), given(module(x)))


def test_a_forward_that_reads_a_gradient_is_refused_by_name() -> None:
    module = Reading(lambda part, x: part.linear(x) + (0 if part.linear.bias.grad is None else part.linear.bias.grad))
    with pytest.raises(memgraph.CaptureError, match=r"reads the \.grad of parameter linear\.bias"):
        memgraph.compile(module, "1GB")(torch.randn(4, 8))
    with pytest.raises(memgraph.CaptureError, match=r"reads the \.grad of parameter linear\.bias"):
        memgraph.compile(Reading(_catching), "1GB")(torch.randn(4, 8))


def _catching(part: Any, x: Tensor) -> Tensor:
    try:
        part.linear.bias.grad  # noqa: B018
    except Exception:
        x = 2 * x
    result: Tensor = part.linear(x)
    return result


def test_a_logger_with_an_attribute_is_read_again_only_if_that_changes() -> None:
    logger: Any = logging.getLogger("a_logger_of_variables")
    logger.factor = 2
    reads = STATES[logging.Logger]
    assert [*map(id, state_contents(reads(logger)))] == [*map(id, state_contents(reads(logger)))]
    assert reads(logging.getLogger("another_logger_of_variables")) == logging.getLogger().getEffectiveLevel()
    before = reads(logger)
    logger.factor = 3
    assert reads(logger) != before
