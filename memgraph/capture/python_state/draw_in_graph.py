"""Let forward draw with `random` and numpy while it is captured.

    random.random()                     ->   an op of the graph, and a number that stands for its result
    _compute_mask_indices(shape, ...)   ->   an op of the graph, and an array that stands for its result

Each run of the step calls the function again.  Functions that are not known here are refused by `refused_draws`.

Numbers and arrays that forward draws with `random` or numpy, as results of ops.

    if random.random() < 0.1: ...     the comparison is an op, and its answer a guard
    torch.tensor(mask)                the array is a tensor of the step, drawn in each run

Whatever else needs the drawn float or array is refused: it would be the same in every step.
"""

from __future__ import annotations

import gc
import inspect
import operator
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import CaptureError
from ...graph.draws.host_draws import DRAW, call, written
from ...system.frames import MEMGRAPH, TORCH
from ...system.python_random import restoring_python_random
from .refused_draws import ALLOWED

# Functions whose results have sizes and a type that follow from the arguments.
PYTHON = (
    "random", "uniform", "randint", "randrange", "getrandbits", "choice", "gauss", "normalvariate", "betavariate",
    "expovariate", "triangular",
)  # fmt: skip
NUMPY = (
    "random", "rand", "random_sample", "ranf", "sample", "uniform", "randint", "choice", "permutation", "normal",
    "randn", "standard_normal", "binomial", "beta", "exponential", "gamma", "poisson",
)  # fmt: skip
# Functions of libraries that draw and compute with numpy, and make a mask with the shape of their argument `shape`.
LIBRARIES = "transformers.models."
MASKS = ("_compute_mask_indices",)  # SpecAugment, in each speech model

Draw = Callable[[ModuleType, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ARITHMETIC = ("add", "sub", "mul", "truediv")
ROUNDINGS = {"__int__": torch.trunc, "__trunc__": torch.trunc, "__floor__": torch.floor, "__ceil__": torch.ceil}
NUMBERS = (bool, int, float)


@contextmanager
def drawing_for_real() -> Iterator[None]:
    """Draw as the functions do, in a forward that runs on real tensors."""

    def draw(module: ModuleType, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if _written(args, kwargs) is None:
            return function(*args, **kwargs)
        with _disable_current_modes():
            result = call(function, args, kwargs)
            value = _as_tensor(result)
        return result if value is None else drawn(value)

    with _replaced(draw):
        yield


@contextmanager
def drawing_in_trace() -> Iterator[None]:
    """Insert ops that draw into the graph that is traced.

    Raises:
        CaptureError: a number that stands for a result outlives the block.
    """
    results: list[weakref.ref[Any]] = []

    def draw(module: ModuleType, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        arguments = _written(args, kwargs)
        form = _form(name, function, args, kwargs) if arguments is not None else None
        if arguments is None or form is None:
            return function(*args, **kwargs)
        text, tensors = arguments
        result = drawn(DRAW(tensors, module.__name__, name, text, sizes=list(form[0]), dtype=form[1]))
        results.append(weakref.ref(result))
        return result

    with _replaced(draw):
        yield
    if any(ref() is not None for ref in results):
        gc.collect()
    if any(ref() is not None for ref in results):
        raise CaptureError(
            "forward returns or stores a number that it draws with `random` or numpy, which would be the same in every "
            "step: return a tensor of it, or draw it outside of the module"
        )


def _written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, list[Tensor]] | None:
    tensors: list[Tensor] = []
    try:
        return written((args, kwargs), tensors), tensors
    except TypeError:
        return None


def _form(
    name: str, function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return sizes and type of a result; None if no tensor has its values."""
    if name in MASKS:
        return tuple(inspect.signature(function).bind(*args, **kwargs).arguments["shape"]), torch.bool
    with restoring_python_random(), _disable_current_modes():
        value = _as_tensor(function(*args, **kwargs))
    return None if value is None else (tuple(value.shape), value.dtype)


def _as_tensor(result: Any) -> Tensor | None:
    """Return the tensor with the values of a result; None if there is none."""
    numpy = sys.modules.get("numpy")
    if type(result) is float:
        return torch.tensor(result, dtype=torch.float64)
    if type(result) not in (bool, int) and not (numpy and isinstance(result, numpy.ndarray | numpy.integer)):
        return None
    try:
        return torch.tensor(result)
    except (TypeError, RuntimeError, OverflowError):
        return None


@contextmanager
def _replaced(draw: Draw) -> Iterator[None]:
    """Call `draw` in place of each known function, where forward calls it in this thread."""
    thread = get_ident()
    with ExitStack() as stack:
        for module, name in _functions():
            replacement = _replacement(module, name, draw, thread)
            stack.enter_context(mock.patch.object(module, name, replacement))
        for name in ("tensor", "as_tensor", "from_numpy"):
            stack.enter_context(mock.patch.object(torch, name, _factory(getattr(torch, name))))
        yield


def _functions() -> Iterator[tuple[ModuleType, str]]:
    yield from ((random, name) for name in PYTHON)
    if "numpy" in sys.modules:
        yield from ((sys.modules["numpy"].random, name) for name in NUMPY)
    libraries = [module for name, module in list(sys.modules.items()) if name.startswith(LIBRARIES)]
    yield from ((module, name) for module in libraries for name in MASKS if inspect.isfunction(vars(module).get(name)))


def _replacement(module: ModuleType, name: str, draw: Draw, thread: int) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(module, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        is_eager = get_ident() != thread or thread in ALLOWED
        if is_eager or sys._getframe(1).f_code.co_filename.startswith((TORCH, MEMGRAPH)):
            return function(*args, **kwargs)
        return draw(module, name, function, args, kwargs)

    return replacement


def _factory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of torch's functions that make a tensor of an array, which also takes what stands for one."""

    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_drawn(data):
            return function(data, *args, **kwargs)
        made = tensor_of(data, *args, **{name: kwargs[name] for name in ("dtype", "device") if name in kwargs})
        return made.requires_grad_() if kwargs.get("requires_grad") else made

    return make


class DrawnNumber:
    """A drawn bool, int or float; `tensor` has its value.

    Python compares it, and rounds it.  The answer is a guard.  An int may also be an index.
    """

    __slots__ = ("__weakref__", "kind", "tensor")

    def __init__(self, tensor: Tensor, kind: type) -> None:
        self.tensor, self.kind = tensor, kind

    @property  # type: ignore[misc] # so that `isinstance(coin, float)` holds, as it does in eager
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] # never set
        return self.kind

    def __bool__(self) -> bool:
        return bool(self.tensor != 0)

    def __index__(self) -> int:
        if self.kind is float:
            raise TypeError("'float' object cannot be interpreted as an integer")
        return int(self.tensor.item())

    def __float__(self) -> float:
        return _refuse("a float") if self.kind is float else float(self.tensor.item())

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("a number")

    def item(self) -> DrawnNumber:
        return self

    def __neg__(self) -> Any:
        return self.kind(0) - self

    def __repr__(self) -> str:
        return f"<a {self.kind.__name__} drawn in forward>"

    __hash__ = None  # type: ignore[assignment]


class DrawnArray:
    """A drawn array; `tensor` has its values. It becomes a tensor, or one of its numbers is taken."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.dim()

    @property
    def size(self) -> int:
        return self.tensor.numel()

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: Any) -> Any:
        return drawn(self.tensor[index]) if type(index) is int else _refuse("an array")

    def item(self) -> Any:
        return drawn(self.tensor.reshape(()))

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("an array")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse("an array")


def drawn(tensor: Tensor) -> DrawnNumber | DrawnArray:
    """Return what stands for the values of a tensor."""
    if tensor.dim():
        return DrawnArray(tensor)
    kind = bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int
    return DrawnNumber(tensor, kind)


def is_drawn(value: object) -> bool:
    return type(value) in (DrawnNumber, DrawnArray)


def tensor_of(value: DrawnNumber | DrawnArray, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """Return what `torch.tensor` makes of it."""
    if dtype is None:
        dtype = torch.get_default_dtype() if isinstance(value, float) else value.tensor.dtype
    return value.tensor.to(device=device if device is not None else torch.get_default_device(), dtype=dtype, copy=True)


def _refuse(what: str) -> NoReturn:
    raise CaptureError(
        f"forward draws {what} with `random` or numpy, and computes with it in Python, which a captured step can't "
        "repeat: compare it, make a tensor of it at once, or draw it with torch or outside of the module"
    )


def _comparison(name: str) -> Callable[[DrawnNumber, Any], Any]:
    def compare(self: DrawnNumber, other: Any) -> Any:
        if type(other) is not DrawnNumber and type(other) not in NUMBERS:
            return NotImplemented
        return bool(getattr(torch, name)(self.tensor, other.tensor if type(other) is DrawnNumber else other))

    return compare


def _arithmetic(name: str, reflected: bool = False) -> Callable[[DrawnNumber, Any], Any]:
    """Return the method that computes in double precision, as Python does."""
    run: Callable[[Any, Any], Any] = getattr(operator, name)

    def compute(self: DrawnNumber, other: Any) -> Any:
        is_number = type(other) in NUMBERS or type(other) is DrawnNumber
        if self.kind is not float or not is_number or (name == "truediv" and (reflected or not other)):
            return NotImplemented
        value = other.tensor if type(other) is DrawnNumber else float(other)
        return DrawnNumber(run(value, self.tensor) if reflected else run(self.tensor, value), float)

    return compute


def _rounding(round_down: Callable[[Tensor], Tensor]) -> Callable[[DrawnNumber], int]:
    def compute(self: DrawnNumber) -> int:
        return int(round_down(self.tensor).to(torch.int64).item())

    return compute


for _name in COMPARISONS:
    setattr(DrawnNumber, f"__{_name}__", _comparison(_name))
for _name in ARITHMETIC:
    setattr(DrawnNumber, f"__{_name}__", _arithmetic(_name))
    setattr(DrawnNumber, f"__r{_name}__", _arithmetic(_name, reflected=True))
for _name, _round in ROUNDINGS.items():
    setattr(DrawnNumber, _name, _rounding(_round))
