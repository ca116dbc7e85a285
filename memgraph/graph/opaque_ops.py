"""Ops that run a part of the module as it is: forward, and backward by autograd.

    y, ticket = memgraph_opaque::forward([w, x], part)
    dw, dx    = memgraph_opaque::backward([w, x], [dy], ticket, part)

The ticket holds no bytes. It carries the state of Python and of the generators from forward to backward, which runs
forward again.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from .define_op import define_op
from .guard_ops import GuardFailed, ValueGuard
from .result_layout import Layout, empty


class MeasuredCost(NamedTuple):
    """Microseconds of an opaque op, and bytes that it allocates beyond its results."""

    us: float
    workspace: int


class Part(Protocol):
    """A part of a module that runs as it is."""

    path: str
    module: nn.Module
    reason: str
    guard: int

    @property
    def nbytes(self) -> int:
        """The workspace of its forward or its backward, whichever is larger."""
        ...

    @property
    def assumed(self) -> ValueGuard:
        """The assumption that its calls have the form of the recorded one, as guard `guard`."""
        ...

    @property
    def changed_attributes(self) -> Sequence[tuple[nn.Module, str]]:
        """The attributes that forward changes, with the submodules that have them."""
        ...

    @property
    def results(self) -> Sequence[Layout]:
        """Layouts of what forward returns, without the ticket."""
        ...

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run forward, and return the results and the ticket."""
        ...

    def backward(self, tensors: Sequence[Tensor], tangents: Sequence[Tensor | None], ticket: Tensor) -> list[Tensor]:
        """Return the gradients that these tangents give."""
        ...

    def gradients(self, tangents: Sequence[Tensor | None]) -> Sequence[Layout]:
        """Return the layouts of these gradients."""
        ...

    def cost(self, target: OpOverload) -> MeasuredCost:
        """Return what forward or backward took where it was measured."""
        ...


_local = threading.local()
_numbers = itertools.count(1)
_parts: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()


def register_part(part: Part) -> int:
    """Return the number by which ops find a part, for as long as it is referenced elsewhere."""
    number = next(_numbers)
    _parts[number] = part
    return number


def with_parts(guards: Sequence[ValueGuard], parts: Sequence[Part]) -> tuple[ValueGuard, ...]:
    """Return the guards of a graph and of its parts, which get the numbers behind them."""
    for number, part in enumerate(parts, len(guards)):
        part.guard = number
    return (*guards, *(part.assumed for part in parts))


def note_undo(restore: Callable[[], None]) -> None:
    """Call this if a guard of the run fails that the current thread makes."""
    if (log := getattr(_local, "undo", None)) is not None:
        log.append(restore)


@contextmanager
def undoing_parts() -> Iterator[None]:
    """Restore the Python state that parts have changed if a guard fails in the block."""
    before, _local.undo = getattr(_local, "undo", None), list[Callable[[], None]]()
    try:
        yield
    except GuardFailed:
        for restore in reversed(_local.undo):
            restore()
        raise
    finally:
        _local.undo = before


def is_opaque(node: fx.Node) -> bool:
    """Return True for an op that runs a part as it is."""
    return node.target in (FORWARD, BACKWARD)


def opaque_cost(node: fx.Node) -> MeasuredCost:
    """Return what an opaque op took when its part was measured."""
    target: OpOverload = node.target  # type: ignore[assignment]
    return _parts[int(node.args[-1])].cost(target)  # type: ignore[arg-type]


def _forward(tensors: Sequence[Tensor], part: int) -> list[Tensor]:
    return _parts[part].forward(tensors)


def _backward(tensors: Sequence[Tensor], tangents: Sequence[Tensor | None], ticket: Tensor, part: int) -> list[Tensor]:
    return _parts[part].backward(tensors, tangents, ticket)


def _fake_forward(tensors: Sequence[Tensor], part: int) -> list[Tensor]:
    return [*_empty(_parts[part].results, tensors[0]), tensors[0].new_empty(0)]


def _fake_backward(
    tensors: Sequence[Tensor], tangents: Sequence[Tensor | None], ticket: Tensor, part: int
) -> list[Tensor]:
    return _empty(_parts[part].gradients(tangents), tensors[0])


def _empty(layouts: Sequence[Layout], like: Tensor) -> list[Tensor]:
    return [empty(form, like.device) for form in layouts]


_library = torch.library.Library("memgraph_opaque", "DEF")
# The tag says that the op can't be dropped or run twice with the same numbers.
FORWARD = define_op(
    _library, "forward(Tensor[] tensors, int part) -> Tensor[]", _forward, _fake_forward,
    (torch.Tag.nondeterministic_seeded,),
)  # fmt: skip
BACKWARD = define_op(
    _library, "backward(Tensor[] tensors, Tensor?[] tangents, Tensor ticket, int part) -> Tensor[]", _backward,
    _fake_backward,
)  # fmt: skip
