"""What a rewritten step does besides computing, as torch ops.

    ticket = memgraph::offload(x, slot)       the copy to the far tier begins
    memgraph::free(ticket, x, slot)           it has ended; x is read here so that it lives until here
    y = memgraph::reload(ticket, slot, ...)   bytes are allocated, the copy back begins
    y = memgraph::wait(y, slot)               it has ended
    y = memgraph::narrow(x)                   cast for the way
    y = memgraph::widen(x)                    and back
    s = memgraph::rng_state(device)           the generator's state
    s = memgraph::swap_rng(s, device)         sets it, and returns the one before
    f = memgraph::stretch(x, begin, end)      elements of a gradient as they lie in memory
    r = memgraph::room(f, nbytes)             what the collective allocates for itself: here it is nothing
    p = memgraph::reduce_scatter(f, r, ...)   ranks begin to sum what they have of a bucket; p is this rank's part
    p = memgraph::reduced(p, f, r, bucket)    it has ended; f and r are read here so that they live until here
    s = memgraph::gather([w, v], bucket, n)   what other ranks have updated of these begins to come, n elements in all
    memgraph::gathered(s, [w, v, r], bucket)  it has ended: w and v are whole

Where they stand in a graph is the plan.  A slot is a place in the far tier; the room that holds the slots is the lease
of the step that runs (`running`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..storage.tiers import Lease
from ..storage.wire_cast import narrow, widen


class Exchange(Protocol):
    """How the ranks of a group sum the gradients of one backward."""

    def begin(self, bucket: int, sent: Tensor) -> None:
        """Begin to sum what lies as a bucket does."""

    def end(self, bucket: int) -> Tensor:
        """Wait for it; this rank's part of the mean."""
        ...


class Gather(Protocol):
    """How what other ranks have updated comes in one forward."""

    def begin(self, bucket: int) -> None:
        """Begin to bring what others have updated of a bucket."""

    def end(self, bucket: int) -> None:
        """Wait until it is there."""


UpdateRunner = Callable[[str, Tensor], None]  # given a parameter's name and its gradient

_local = threading.local()
_library = torch.library.Library("memgraph", "DEF")


@contextmanager
def running(
    lease: Lease | None,
    sent: dict[int, Tensor],
    update: UpdateRunner | None = None,
    exchange: Exchange | None = None,
    gather: Gather | None = None,
) -> Iterator[None]:
    """Ops of this thread copy to and from `lease`, note in `sent` what lies there, let `update` update parameters, sum
    gradients over the ranks of `exchange`, and have `gather` bring what those have updated; nothing, if it is None.

    A generator that an error left in an earlier state is set right.
    """
    before = {name: getattr(_local, name, None) for name in ("lease", "sent", "update", "exchange", "gather")}
    vars(_local).update(lease=lease, sent=sent, update=update, exchange=exchange, gather=gather, swapped=None)
    try:
        yield
    finally:
        vars(_local).update(before)
        if (swapped := getattr(_local, "swapped", None)) is not None:
            _swap_rng(*swapped)


def accumulate(gradient: Tensor | None, new: Tensor) -> Tensor:
    """`gradient` with `new` added in place, as autograd accumulates; `new` itself, if there is none yet."""
    if gradient is None:
        return new
    _add(gradient.conj(), new.conj()) if gradient.is_conj() else _add(gradient, new)
    return gradient


def _add(total: Tensor, new: Tensor) -> None:
    """Add in place without the copy that torch makes of what is yet to be conjugated; the bits are the same."""
    if new.is_conj() and not total.is_neg() and not new.is_neg():
        total, new = torch.view_as_real(total), torch.view_as_real(new.conj())
        total[..., 0].add_(new[..., 0])
        total[..., 1].sub_(new[..., 1])
    else:
        total.add_(new)


def update(parameter: Tensor, gradient: Tensor, name: str) -> None:
    """Have the optimizer update the parameter of this name, whose gradient is whole."""
    _local.update(name, gradient)


def state_nbytes(device: torch.device) -> int:
    """The bytes of the state of the generator of `device`."""
    return _get_state(device).nbytes


def _lease() -> Lease:
    lease: Lease | None = getattr(_local, "lease", None)
    if lease is None:
        raise RuntimeError("a memgraph op runs outside of a step: call the compiled module, not its graphs")
    return lease


def _offload(x: Tensor, slot: int) -> Tensor:
    _lease().offload(slot, x)
    _local.sent[slot] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return x.new_empty(0)


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
    if ticket is None:  # a gradient that is not there yet
        return None
    sent = _local.sent.get(slot, ticket)  # bytes come as they lie there, whatever strides were expected
    tensor = torch.empty_strided(sent.shape, sent.stride(), dtype=sent.dtype, device=device)
    _lease().reload(slot, tensor)
    return tensor


def _wait(x: Tensor | None, slot: int) -> Tensor | None:
    if x is not None:
        _lease().wait(slot)
    return x


def _get_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _swap_rng(state: Tensor, device: torch.device) -> Tensor:
    before = _get_state(device)
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
    _local.swapped = None if getattr(_local, "swapped", None) else (before, device)  # every second swap is back
    return before


def stretch(x: Tensor, begin: int, end: int) -> Tensor:
    """Elements of a tensor without gaps, counted as they lie in memory."""
    return x.as_strided((end - begin,), (1,), int(x.storage_offset()) + begin)


def _room(x: Tensor, nbytes: int) -> Tensor:
    return x.new_empty(0, dtype=torch.uint8)


def _reduce_scatter(x: Tensor, room: Tensor, bucket: int, part: int) -> Tensor:
    _local.exchange.begin(bucket, x)
    return x.new_empty(0)  # what has come is handed out where it is waited for


def _reduced(part: Tensor, x: Tensor, room: Tensor, bucket: int) -> Tensor:
    found: Tensor = _local.exchange.end(bucket)
    return found


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


def _fake_narrow(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16)


def _fake_widen(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


def _fake_rng_state(device: torch.device) -> Tensor:
    return torch.empty(state_nbytes(device), dtype=torch.uint8)


def _fake_swap_rng(state: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(state)


def _fake_room(x: Tensor, nbytes: int) -> Tensor:
    return x.new_empty(nbytes, dtype=torch.uint8)


def _fake_reduce_scatter(x: Tensor, room: Tensor, bucket: int, part: int) -> Tensor:
    return x.new_empty(part)


def _fake_gather(parameters: Sequence[Tensor], bucket: int, size: int) -> Tensor:
    return parameters[0].new_empty(()).expand(size)  # so that its type says what comes


# What torch is told of each, what runs, and what its result looks like.
OPS: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("offload(Tensor x, int slot) -> Tensor", _offload, _empty),
    ("free(Tensor ticket, Tensor x, int slot) -> ()", _free, _nothing),
    (
        "reload(Tensor ticket, int slot, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor",
        _reload,
        _fake_reload,
    ),
    ("wait(Tensor(a) x, int slot) -> Tensor(a)", _wait, _first),
    ("narrow(Tensor x) -> Tensor", narrow, _fake_narrow),
    ("widen(Tensor x) -> Tensor", widen, _fake_widen),
    ("rng_state(Device device) -> Tensor", _get_state, _fake_rng_state),
    ("swap_rng(Tensor state, Device device) -> Tensor", _swap_rng, _fake_swap_rng),
    ("stretch(Tensor(a) x, int begin, int end) -> Tensor(a)", stretch, stretch),
    ("room(Tensor x, int nbytes) -> Tensor", _room, _fake_room),
    ("reduce_scatter(Tensor x, Tensor room, int bucket, int part) -> Tensor", _reduce_scatter, _fake_reduce_scatter),
    ("reduced(Tensor(a) part, Tensor x, Tensor room, int bucket) -> Tensor(a)", _reduced, _first),
    ("gather(Tensor[] parameters, int bucket, int size) -> Tensor", _gather, _fake_gather),
    ("gathered(Tensor sent, Tensor[] parameters, int bucket) -> ()", _gathered, _nothing),
)
RUN: dict[str, Callable[..., Any]] = {}  # what runs, by the op's name
for _schema, _run, _fake in OPS:
    _library.define(_schema)
    _name = _schema.partition("(")[0]
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"memgraph::{_name}", _fake, lib=_library)
    RUN[_name] = _run
