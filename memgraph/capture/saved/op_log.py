"""A digest of all that a call does on fake tensors: every op of forward and backward, with its arguments and results.

h = linear(x); h.relu_(); ...   ->   "aten.addmm(s1 f32[8, 4], ...) -> s9 f32[8, 4] ...", ...   ->   9f31c0...

Two calls with one digest ran the same ops on the same data, so that one graph serves both.  Tensors are described by
storage and layout: the order of the ops then says which value an op reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...graph.nodes import DEVICE_OF
from ...tensors.layout import has_storage

MAX_CONSTANT_NBYTES = 1 << 20  # of a real tensor, whose content is part of the digest
PLAIN = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
Place = Callable[[], object]


class OpLog(TorchDispatchMode):
    """Writes down the ops that run while it is entered; `place` says where in the module each of them is.

    Attributes:
        is_kept: False if the capture is not kept for later processes: nothing is written down.
        constants: the real tensors that ops read, in the order of their first use.
    """

    supports_higher_order_operators = True  # they are passed on, and what they do is unknown
    is_rehearsal = False  # no graph is built

    def __init__(self, is_kept: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_kept = is_kept
        self.constants: list[Tensor] = []
        self.reason = ""  # why the digest does not say all that was done
        self._lines: list[str] = []
        self._place: Place = lambda: ""
        self._storages: dict[int, int] = {}
        self._constants: dict[int, str] = {}
        self._alive: list[torch.UntypedStorage] = []  # so that no address is reused

    def again(self) -> OpLog:
        """Return an empty log for a second trace of the call."""
        return OpLog(self.is_kept)

    @contextmanager
    def recording(self, inputs: Sequence[Tensor], place: Place) -> Iterator[None]:
        """Record the ops of one call with these fake inputs."""
        if not self.is_kept:
            yield
            return
        self._place = place
        self.note("inputs", self._results(list(inputs)))
        try:
            with self:
                yield
        finally:
            self._place = lambda: ""

    def end(self, results: Sequence[Tensor], *facts: object) -> None:
        """Record which tensors the call results in."""
        if self.is_kept:
            self.note("results", self._described(list(results)), *facts)

    def note(self, *facts: object) -> None:
        """Add facts that belong to the digest."""
        self._lines.append(repr(facts))

    def compare(self, second: OpLog) -> None:
        """Compare with the log of a second trace, if there was one."""
        if second._lines and second.digest() != self.digest():
            self.reason = self.reason or "a second trace did something else"

    def digest(self) -> str:
        """Return the digest of everything that was recorded; empty if it is not all that was done."""
        return "" if self.reason else hashlib.sha256("\n".join(self._lines).encode()).hexdigest()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE_OF:
            return self.run(func, args, kwargs)
        read = self._described((args, kwargs)) if isinstance(func, OpOverload) else self._unknown(str(func))
        result = self.run(func, args, kwargs)
        self._lines.append(f"{func} {read} -> {self._results(result)} {self._place()}")
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op in the modes below."""
        return func(*args, **kwargs)

    def _described(self, thing: Any) -> str:
        kind = type(thing)
        if kind in PLAIN:
            return repr(thing)
        if isinstance(thing, Tensor):
            return self._fake(thing) if isinstance(thing, FakeTensor) else self._constant(thing)
        if isinstance(thing, list | tuple):
            return f"{kind.__name__}({', '.join(map(self._described, thing))})"
        if kind is dict:
            return f"{{{', '.join(f'{key}={self._described(value)}' for key, value in thing.items())}}}"
        return self._unknown(f"an argument of type {kind.__name__}")

    def _results(self, result: Any) -> str:
        if isinstance(result, Tensor):
            return self._made(result)
        if isinstance(result, list | tuple):
            return f"({', '.join(map(self._results, result))})"
        return self._described(result)

    def _made(self, tensor: Tensor) -> str:
        """Describe a result, which may have a new storage."""
        if isinstance(tensor, FakeTensor) and has_storage(tensor) and storage_of(tensor) not in self._storages:
            self._alive.append(tensor.untyped_storage())
            self._storages[storage_of(tensor)] = len(self._storages)
        return self._described(tensor)

    def _fake(self, tensor: FakeTensor) -> str:
        # Not kept by the tensor's identity: `x.data = y` changes what a tensor is, and runs no op.
        if not has_storage(tensor) or storage_of(tensor) not in self._storages:
            return self._unknown("a fake tensor that no op has made")
        return f"s{self._storages[storage_of(tensor)]} {_layout(tensor)}"

    def _constant(self, tensor: Tensor) -> str:
        """Describe a real tensor by the position in which it is read first."""
        if id(tensor) not in self._constants:
            place = len(self.constants)
            self.constants.append(tensor)
            self._constants[id(tensor)] = f"constant {place} {self._content(tensor)}"
        return self._constants[id(tensor)]

    def _content(self, tensor: Tensor) -> str:
        """Return layout and digest of a constant: forward may have read a small one."""
        if not has_storage(tensor) or tensor.is_conj() or tensor.is_neg() or type(tensor) is not Tensor:
            return self._unknown(f"a constant of type {type(tensor).__name__}")
        if tensor.numel() * tensor.element_size() > MAX_CONSTANT_NBYTES or tensor.device.type != "cpu":
            return _layout(tensor)
        with _disable_current_modes(), torch.no_grad():
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{_layout(tensor)} {hashlib.sha256(content).hexdigest()}"

    def _unknown(self, what: str) -> str:
        self.reason = self.reason or f"an op reads or makes what has no description: {what}"
        return "?"


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_in(arguments: Any) -> list[Tensor]:
    """Return the tensors among an op's arguments."""
    if isinstance(arguments, Tensor):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if isinstance(arguments, list | tuple):
        return [tensor for argument in arguments for tensor in tensors_in(argument)]
    return []


def _layout(tensor: Tensor) -> str:
    lazy = "conj" * tensor.is_conj() + "neg" * tensor.is_neg()
    return (
        f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()} "
        f"{tensor.untyped_storage().nbytes()} {tensor.device} {tensor.requires_grad} {lazy}"
    )
