"""Runtime ops of a rewritten step, as torch ops.

    ticket = memgraph::offload(x, slot)       begin the copy to the tier
    memgraph::free(ticket, x, slot)           wait for it; reads x, so that x lives until here
    y = memgraph::reload(ticket, slot, ...)   allocate bytes, begin the copy back
    y = memgraph::wait(y, slot)               wait for it
    y = memgraph::narrow(x)                   cast for the copy
    y = memgraph::widen(x)                    cast back
    s = memgraph::rng_state(device)           the generator's state
    s = memgraph::swap_rng(s, device)         set it, and return the previous one
    f = memgraph::stretch(x, begin, end)      elements of a gradient in memory order
    r = memgraph::room(f, nbytes)             workspace of the collective: nothing at run time
    p = memgraph::reduce_scatter(f, r, ...)   begin to sum a bucket over ranks; p is this rank's shard
    p = memgraph::reduced(p, f, r, bucket)    wait for it; reads f and r, so that they live until here
    s = memgraph::gather([w, v], bucket, n)   begin to gather n elements that other ranks have updated
    memgraph::gathered(s, [w, v, r], bucket)  wait for it: w and v are complete

Their order in the graph is the plan. A slot is memory in the tier; the lease of the current run holds the slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._ops import OpOverload

from ..storage.tiers import Lease
from ..storage.wire_cast import narrow, widen
from .define_op import define_op


class Exchange(Protocol):
    """Sums gradients over the ranks of a group."""

    def begin(self, bucket: int, sent: Tensor) -> None:
        """Begin to reduce a bucket."""

    def end(self, bucket: int) -> Tensor:
        """Wait for it, and return this rank's shard of the mean."""
        ...


class Gather(Protocol):
    """Gathers parameters that other ranks have updated."""

    def begin(self, bucket: int) -> None:
        pass

    def end(self, bucket: int) -> None:
        pass


UpdateRunner = Callable[[str, Tensor], None]  # takes a parameter's name and its gradient

_local = threading.local()
_library = torch.library.Library("memgraph", "DEF")


@contextmanager
def op_context(
    lease: Lease | None,
    sent: dict[int, Tensor],
    update: UpdateRunner | None = None,
    exchange: Exchange | None = None,
    gather: Gather | None = None,
    agree: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Let the ops of this thread use these. At the end, restore a generator that an error left in another state.

    `sent` gets the layout of each offloaded tensor, by slot. `agree` is called once all guards of forward have held.
    """
    before = {name: getattr(_local, name, None) for name in ("lease", "sent", "update", "exchange", "gather", "agree")}
    vars(_local).update(lease=lease, sent=sent, update=update, exchange=exchange, gather=gather, swapped=None)
    _local.agree = agree
    try:
        yield
    finally:
        vars(_local).update(before)
        if (swapped := getattr(_local, "swapped", None)) is not None:
            _swap_rng(*swapped)


def is_in_step() -> bool:
    """Return True while this thread runs a step, and not an op alone."""
    return getattr(_local, "agree", None) is not None


def agree_with_ranks() -> None:
    """Wait until the guards of all ranks have held."""
    if is_in_step():
        _local.agree()


def accumulate(gradient: Tensor | None, new: Tensor) -> Tensor:
    """Add `new` to `gradient` in place, as autograd does; return `new` if there is no gradient."""
    if gradient is None:
        return new
    _add(gradient.conj(), new.conj()) if gradient.is_conj() else _add(gradient, new)
    return gradient


def _add(total: Tensor, new: Tensor) -> None:
    """Add in place without the copy that torch makes of a lazy conjugate; the bits are the same."""
    if new.is_conj() and not total.is_neg() and not new.is_neg():
        total, new = torch.view_as_real(total), torch.view_as_real(new.conj())
        total[..., 0].add_(new[..., 0])
        total[..., 1].sub_(new[..., 1])
    else:
        total.add_(new)


def update(parameter: Tensor, gradient: Tensor, name: str) -> None:
    """Let the optimizer update the parameter of this name."""
    _local.update(name, gradient)


def state_nbytes(device: torch.device) -> int:
    """Return the bytes of the generator state of `device`."""
    return get_state(device).nbytes


def _lease() -> Lease:
    lease: Lease | None = getattr(_local, "lease", None)
    if lease is None:
        raise RuntimeError("a memgraph op runs outside of a step: call the compiled module, not its graphs")
    return lease


def _offload(x: Tensor, slot: int) -> Tensor:
    _lease().offload(slot, x)
    _local.sent[slot] = _layout(x.shape, x.stride(), x.dtype)
    return x.new_empty(0)


@lru_cache(4096)
def _layout(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor without bytes that has this layout, the same one each time."""
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _free(ticket: Tensor, x: Tensor, slot: int) -> None:
    _lease().free(slot)


def _reload(
    ticket: Tensor | None,
    slot: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    if ticket is None:  # there is no gradient yet
        return None
    sent = _local.sent.get(slot, ticket)  # with the strides of the copy, whatever was expected
    tensor = torch.empty_strided(sent.shape, sent.stride(), dtype=sent.dtype, device=device)
    _lease().reload(slot, tensor)
    return tensor


def _wait(x: Tensor | None, slot: int) -> Tensor | None:
    if x is not None:
        _lease().wait(slot)
    return x


def get_state(device: torch.device) -> Tensor:
    """Return the state of torch's own generator of a device."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_state(state: Tensor, device: torch.device) -> None:
    """Set the state of torch's own generator of a device."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _swap_rng(state: Tensor, device: torch.device) -> Tensor:
    before = get_state(device)
    set_state(state, device)
    _local.swapped = None if getattr(_local, "swapped", None) else (before, device)  # every second swap restores it
    return before


def stretch(x: Tensor, begin: int, end: int) -> Tensor:
    """Return elements of a dense tensor, counted in memory order."""
    return x.as_strided((end - begin,), (1,), int(x.storage_offset()) + begin)


def _room(x: Tensor, nbytes: int) -> Tensor:
    return x.new_empty(0, dtype=torch.uint8)


def _reduce_scatter(x: Tensor, room: Tensor, bucket: int, part: int) -> Tensor:
    _local.exchange.begin(bucket, x)
    return x.new_empty(0)  # `reduced` returns the shard


def _reduced(part: Tensor, x: Tensor, room: Tensor, bucket: int) -> Tensor:
    shard: Tensor = _local.exchange.end(bucket)
    return shard


def _gather(parameters: Sequence[Tensor], bucket: int, size: int) -> Tensor:
    if (gather := getattr(_local, "gather", None)) is not None:
        gather.begin(bucket)
    return parameters[0].new_empty(0)


def _gathered(sent: Tensor, parameters: Sequence[Tensor], bucket: int) -> None:
    if (gather := getattr(_local, "gather", None)) is not None:
        gather.end(bucket)


def _empty(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(0)


def _nothing(*_: object) -> None:
    pass


def _first(x: Tensor, *_: object) -> Tensor:
    return x


def _fake_reload(
    ticket: Tensor, slot: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _fake_rng_state(device: torch.device) -> Tensor:
    return torch.empty(state_nbytes(device), dtype=torch.uint8)


def _fake_swap_rng(state: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(state)


def _fake_room(x: Tensor, nbytes: int) -> Tensor:
    return x.new_empty(nbytes, dtype=torch.uint8)


def _fake_reduce_scatter(x: Tensor, room: Tensor, bucket: int, part: int) -> Tensor:
    return x.new_empty(part)


def _fake_gather(parameters: Sequence[Tensor], bucket: int, size: int) -> Tensor:
    return parameters[0].new_empty(()).expand(size)  # so that the type has the gathered size


# Schema, implementation, and fake implementation.
OPS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("offload(Tensor x, int slot) -> Tensor", _offload, _empty),
    ("free(Tensor ticket, Tensor x, int slot) -> ()", _free, _nothing),
    (
        "reload(Tensor ticket, int slot, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor",
        _reload,
        _fake_reload,
    ),
    ("wait(Tensor(a) x, int slot) -> Tensor(a)", _wait, _first),
    ("narrow(Tensor x) -> Tensor", narrow, partial(torch.empty_like, dtype=torch.bfloat16)),
    ("widen(Tensor x) -> Tensor", widen, partial(torch.empty_like, dtype=torch.float32)),
    ("rng_state(Device device) -> Tensor", get_state, _fake_rng_state),
    ("swap_rng(Tensor state, Device device) -> Tensor", _swap_rng, _fake_swap_rng),
    ("stretch(Tensor(a) x, int begin, int end) -> Tensor(a)", stretch, stretch),
    ("room(Tensor x, int nbytes) -> Tensor", _room, _fake_room),
    ("reduce_scatter(Tensor x, Tensor room, int bucket, int part) -> Tensor", _reduce_scatter, _fake_reduce_scatter),
    ("reduced(Tensor(a) part, Tensor x, Tensor room, int bucket) -> Tensor(a)", _reduced, _first),
    ("gather(Tensor[] parameters, int bucket, int size) -> Tensor", _gather, _fake_gather),
    ("gathered(Tensor sent, Tensor[] parameters, int bucket) -> ()", _gathered, _nothing),
)


def _recorded(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that a profiler sees by the op's name, though torch's dispatcher does not call it."""
    name = op.name()

    def call(*args: Any) -> Any:
        if not _profiler_enabled():
            return run(*args)
        with torch.profiler.record_function(name):
            return run(*args)

    return call


RUN: dict[str, Callable[..., Any]] = {}  # what runs, by the op's name
for _schema, _run, _fake in OPS:
    _op = define_op(_library, _schema, _run, _fake)
    RUN[_op._opname] = _recorded(_op, _run)
