"""Attributes of torch's own objects, and of tensors, that are read while a call is traced: graphs rest on these alone.

self.schedule.get_last_lr()   ->   note(the scheduler, "_last_lr")
Normal(mean, 1).rsample()     ->   nothing: the call has made it
y * self.weight.lr_scale      ->   note(weight, "lr_scale"), whose stand-in was asked
x.storage_offset()            ->   CaptureError: of an argument, another tensor in each call
id(self.weight)               ->   that of the weight
self.weight in {self.weight}  ->   CaptureError: another tensor stands for it

Optimizers, schedulers and their like change in each step, mostly unread, so they are not described as other objects.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple, NoReturn, TypeGuard
from unittest.mock import patch

from torch import Tensor, nn, optim
from torch.amp import GradScaler
from torch.distributions import Distribution
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import CaptureError
from ..system.entered_code import is_watched
from ..system.frames import MEMGRAPH
from .packages import is_package_file

REAL = "_memgraph_real"
UNCOMPARED = (
    "grad_fn",
    "_base",
    "_backward_hooks",
    "_version",
    "retains_grad",
    "output_nr",
    "storage_offset",
    "_is_view",
    "is_shared",
    "is_inference",
)
# These look for one name in all attributes, which was asked for before.
FINDING = frozenset(each.__code__ for each in (nn.Module.__getattr__, nn.Module.__setattr__, nn.Module.__delattr__))
ID, EQUAL = id, Tensor.__eq__
LEAF: Any = Tensor.is_leaf  # a fact of a call, as `grad_fn is None` is, and so is the type
KINDS = (optim.Optimizer, LRScheduler, Distribution, GradScaler, Sampler, Dataset, DataLoader)


@contextmanager
def noting_reads(note: Callable[[Any, str], object]) -> Iterator[None]:
    """Tell `note` of each attribute that is read in the block of an object that was there before, once."""
    thread = get_ident()  # others may load the next batch
    made: dict[int, Any] = {}  # which keeps them, so that no number is used again
    seen: dict[int, set[str]] = {}  # names, by the id of an object

    def watched(kind: Any) -> dict[str, Any]:
        get, set_ = kind.__getattribute__, kind.__setattr__

        def read(thing: Any, name: str) -> Any:
            value = get(thing, name)
            if get_ident() == thread and id(thing) not in made and not name.startswith("__"):  # isinstance() reads one
                names = seen.setdefault(id(thing), set())
                is_new = name not in names
                names.add(name)
                if is_new and not callable(value):  # a method reads others
                    note(thing, name)
            return value

        def write(thing: Any, name: str, value: Any) -> None:
            if id(thing) not in seen:
                made[id(thing)] = thing  # the first that happens to a new object
            set_(thing, name, value)

        return {"__getattribute__": read, "__setattr__": write}

    with ExitStack() as stack:
        for kind in KINDS:
            for name, function in watched(kind).items():
                stack.enter_context(patch.object(kind, name, function))
        yield


Note = Callable[[nn.Module, str], object]
_notes: list[
    tuple[int, Note, Note]
] = []  # of the blocks that are running: the thread, and what reads and writes are told


@contextmanager
def noting_modules(read: Note, write: Note = lambda *_: None) -> Iterator[None]:
    """Tell of the attributes of modules that the block reads, whether they are there or not, and sets."""
    note = get_ident(), read, write
    with ExitStack() as stack:
        if not _notes:
            for name, function in _telling().items():
                stack.enter_context(patch.object(nn.Module, name, function))
        _notes.append(note)
        stack.callback(_notes.remove, note)
        yield


def _is_ours(code: CodeType, read: Any) -> bool:
    """Return True for code of this package, but for `read`, beneath which a property reads other attributes."""
    return code.co_filename.startswith(MEMGRAPH) and code is not read.__code__


def _telling() -> dict[str, Callable[..., Any]]:
    """Return methods of `nn.Module` that tell of reads and writes."""
    get, set_, delete = nn.Module.__getattribute__, nn.Module.__setattr__, nn.Module.__delattr__

    def tell(module: nn.Module, name: str, is_write: bool) -> None:
        thread = get_ident()
        for of, read, write in _notes:
            if of == thread:
                (write if is_write else read)(module, name)

    def read(module: nn.Module, name: str) -> Any:
        code = sys._getframe(1).f_code
        if code not in FINDING and not _is_ours(code, read):
            tell(module, name, False)
        return get(module, name)

    def write(module: nn.Module, name: str, value: Any) -> None:
        tell(module, name, True)
        set_(module, name, value)

    def remove(module: nn.Module, name: str) -> None:
        tell(module, name, False)  # it has to be there
        delete(module, name)

    return {"__getattribute__": read, "__setattr__": write, "__delattr__": remove}


@contextmanager
def noting_objects(kinds: Iterable[type], note: Callable[[str], object]) -> Iterator[None]:
    """Tell of the names of attributes that the block reads of objects of these classes, or sets, by whatever code."""
    thread, get = get_ident(), object.__getattribute__

    def read(thing: Any, name: str) -> Any:
        if get_ident() == thread and not _is_ours(sys._getframe(1).f_code, read):
            note(name)
        return get(thing, name)

    def setting(set_: Callable[[Any, str, Any], object]) -> Callable[[Any, str, Any], None]:
        def write(thing: Any, name: str, value: Any) -> None:
            if get_ident() == thread:
                note(name)
            set_(thing, name, value)

        return write

    with ExitStack() as stack:
        for kind in kinds:
            try:
                stack.enter_context(patch.object(kind, "__getattribute__", read))
                set_: Any = kind.__setattr__
                stack.enter_context(patch.object(kind, "__setattr__", setting(set_)))
            except Exception:  # its attributes can't be set: then all of its objects counts
                note("__dict__")
        yield


class _Real(NamedTuple):
    tensor: Tensor
    label: str
    is_argument: bool
    own: frozenset[str]  # what the stand-in has itself


def show_attributes(standing: Tensor, tensor: Tensor, label: str, is_argument: bool) -> None:
    """Let a tensor that stands for another have the other's attributes."""
    setattr(standing, REAL, _Real(tensor, label, is_argument, frozenset({*vars(standing), REAL})))


def refuse_set_attributes(standing: Iterable[Tensor]) -> None:
    """
    Raises:
        CaptureError: an attribute of one has been set.
    """
    for each in standing:
        real: _Real | None = vars(each).get(REAL)
        if real is not None and (names := vars(each).keys() - real.own):
            raise CaptureError(
                f"forward sets the attribute {min(names)} of {real.label}, as no captured step can: set the module's"
            )


def _asked_text(real: _Real, name: str) -> str:
    return (
        f"forward asks for the attribute {name} of {real.label}, which no later call can be compared by: "
        "give it as an argument of its own"
    )


@contextmanager
def noting_attributes(note: Callable[[Tensor, str], object]) -> Iterator[None]:
    """Tell `note` of the attributes that the block reads of tensors for which others stand.

    Raises:
        CaptureError: it reads one of an argument, which is another tensor in each call.
    """
    errors: list[CaptureError] = []

    def is_asked(real: _Real | None, name: str) -> TypeGuard[_Real]:
        code = sys._getframe(2).f_code.co_filename
        if real is None or not is_watched(code):
            return False
        # Libraries ask tensors for what only those of another framework have.
        return name in vars(real.tensor) or hasattr(Tensor, name) or not is_package_file(Path(code))

    def refuse(text: str) -> NoReturn:
        errors.append(CaptureError(text))
        raise errors[-1]

    def find(standing: Tensor, name: str) -> Any:
        real: _Real | None = vars(standing).get(REAL)
        if is_asked(real, name):
            if real.is_argument:
                refuse(_asked_text(real, name))
            note(real.tensor, name)
        if real is not None and name in vars(real.tensor):
            return vars(real.tensor)[name]
        raise AttributeError(f"'{type(standing).__name__}' object has no attribute '{name}'")

    def refusing(name: str) -> Any:
        known = getattr(Tensor, name)

        def get(standing: Tensor) -> Any:
            real: _Real | None = vars(standing).get(REAL)
            if is_asked(real, name) and not (name == "grad_fn" and LEAF.__get__(real.tensor)):
                refuse(_asked_text(real, name))
            return known(standing) if callable(known) else known.__get__(standing)

        return get if callable(known) else property(get, known.__set__)

    with ExitStack() as stack:
        stack.enter_context(_real_identity(refuse))
        stack.enter_context(patch.object(Tensor, "__getattr__", find, create=True))
        stack.enter_context(patch.object(Tensor, "is_leaf", property(_is_leaf), create=True))
        for name in UNCOMPARED:
            stack.enter_context(patch.object(Tensor, name, refusing(name), create=True))
        yield
    if errors:
        raise errors[0]  # it was caught


@contextmanager
def _real_identity(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """Let code of the user's find a parameter by its number, though another tensor stands for it; refuse other ways."""

    def number(thing: Any) -> int:
        real: _Real | None = vars(thing).get(REAL) if issubclass(type(thing), Tensor) else None
        if real is None or not is_watched(sys._getframe(1).f_code.co_filename):
            return ID(thing)
        if real.is_argument:
            refuse(_asked_text(real, "id"))
        return ID(real.tensor)

    def key(standing: Tensor) -> int:
        real: _Real | None = vars(standing).get(REAL)
        is_theirs = real is not None and is_watched(sys._getframe(1).f_code.co_filename)
        return ID(real.tensor if real is not None and is_theirs else standing)

    def equal(first: Tensor, second: Any) -> Any:
        for one, other in ((first, second), (second, first)) if isinstance(second, Tensor) else ():
            real: _Real | None = vars(one).get(REAL)
            if real is not None and real.tensor is other:
                refuse(
                    f"forward looks for {real.label} in a set or a dict that has it, or compares it with itself, but "
                    "another tensor stands for it while a step is captured: go by its name, as in named_parameters()"
                )
        return EQUAL(first, second)

    with (
        patch.object(builtins, "id", number),
        patch.object(Tensor, "__hash__", key),
        patch.object(Tensor, "__eq__", equal, create=True),
    ):
        yield


def _is_leaf(standing: Tensor) -> bool:
    real: _Real | None = vars(standing).get(REAL)
    return bool(LEAF.__get__(standing if real is None else real.tensor))
