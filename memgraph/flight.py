"""One step in flight: from the begin of its forward to the end of its backward.

It holds what lies between the two: the list of saved values, the room in the far tier, and the meter or the clock, if
this flight is measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from .anomaly import finds_nan, run_checked
from .errors import MemgraphError, RecordingError
from .homes import Place
from .letting_go import Leaving, Lent
from .ops import Exchange, Lease, Updater, running
from .oss.awaited import Coming
from .peak import Allocation, Meter, resident_bytes
from .split import Halves
from .times import Clock, Times, Wall, noting
from .versions import refuse_changed, version_of


class Tier(Protocol):
    """Where offloaded values lie."""

    staging: int  # bytes of the device that copies take

    def bind(self, homes: Mapping[int, Place]) -> None:
        """Let slots be where tensors of the state live, in all flights from now on."""

    def lease(self) -> Lease:
        """Room for one step in flight."""
        ...

    def close(self) -> None:
        """Give the bytes back, those of a lease that is out when it is released."""


class Recorded(Protocol):
    """Both halves of a step, noted down: see `recording.py`."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...
    def backward(self, tangents: Sequence[Tensor]) -> list[Tensor]: ...
    def give_back(self) -> None: ...


class Flight:
    """Runs the two halves of a step once."""

    # What `land` reads is there even if the tier has no lease to give.
    lease: Lease | None = None
    recording: Recorded | None = None  # with which it flies, and not op by op
    meter: Meter | None = None
    clock: Clock | None = None
    wall: AbstractContextManager[None] = nullcontext()  # times the halves as wholes
    ended = False
    update: Updater | None = None  # of a backward that updates parameters by itself
    exchange: Exchange | None = None  # of a backward whose gradients the ranks of a group sum
    coming: Coming | None = None  # what forward gathers of what other ranks have updated
    meeting: Callable[[], None] | None = None  # waits for the others, and looks whether they run the same step
    leaving: Leaving | None = None  # tells the meter when what came to backward goes
    lent: Lent | None = None  # its outputs, which may be gone when backward begins
    given: Sequence[int] = ()  # the places, among the tensors that it reads, of what the caller gives
    states: int | None = None  # bytes of the optimizer's states that were there when such a flight began
    explained: Callable[[], AbstractContextManager[None]] = nullcontext  # says what is behind a want of memory

    floats: Sequence[float] = ()  # of the call, which both halves read

    def __init__(self, halves: Halves, tier: Tier | None, recording: Recorded | None = None) -> None:
        self.halves, self.recording = halves, recording
        self.lease = tier.lease() if tier is not None and recording is None else None
        self.sent: dict[int, Tensor] = {}  # meta tensors: how what lies in each slot was laid out
        self.saved: list[Tensor] | None = None
        self.seen: list[tuple[Tensor, int]] = []
        self.beyond = ""  # why it takes more than was forecast, if it does
        self.absent = 0  # bytes that were forecast to be there before it, and are not
        self.others = 0  # bytes that other open flights held beside it, at most
        self._handed: list[weakref.ref[Tensor]] = []  # what its caller gave, and what it returned
        self.shared = False  # whether another was open with it, so that autograd has to sum their gradients

    def watched(self, tangents: Sequence[Tensor | None]) -> AbstractContextManager[None]:
        """Measure what a backward allocates, if this flight is measured; tangents that are read as they came lie there
        for it, and outputs that nobody has any more do not."""
        if self.meter is None:
            return nullcontext()
        gone = self.lent.gone_nbytes() if self.lent is not None else 0
        return self.meter.window(resident_bytes(self._came(tangents)) - gone)

    def _came(self, tangents: Sequence[Tensor | None]) -> list[Tensor]:
        """The tangents that backward reads as they came."""
        pairs = zip(self.halves.tangents, tangents, strict=True)
        return [tangent for fake, tangent in pairs if tangent is not None and _fits(fake, tangent)]

    def time(self, device: torch.device) -> None:
        """Measure the time of this flight."""
        self.clock = Clock(device)

    def met(self) -> None:
        """All ranks are about to go through the same step.

        Raises:
            ShardError: they are not.
        """
        if self.meeting is not None:
            self.meeting()
            self.meeting = None

    def bind(self, homes: Mapping[int, Place]) -> None:
        """Let slots of this flight alone be elsewhere."""
        if self.lease is not None and homes:
            self.lease.bind(homes)

    def forward(self, tensors: Sequence[Tensor], outputs: int) -> list[Tensor]:
        """The outputs, given the inputs; what backward needs is kept here."""
        try:
            with self.wall:
                values = self._forward(tensors)
        except BaseException:
            if self.coming is not None:
                self.coming.close()
            raise
        # A parameter may be bound to other bytes before backward, which wants those that forward took.  Of an output
        # the caller's own tensor is not held: so one sees whether the caller holds it.  And it leads to this node
        # of autograd, which holds the flight: a circle that nobody would free if no backward comes.
        theirs = {id(value) for value in values[:outputs]}
        self.saved = [
            x.detach() if isinstance(x, torch.nn.Parameter) or id(x) in theirs else x for x in values[outputs:]
        ]
        del values[outputs:]
        self.ended = self.halves.backward is None
        near = [*tensors, *values]
        handed = (near[i] for i in (*self.given, *range(len(tensors), len(near))))
        self._handed = [weakref.ref(tensor) for tensor in handed if tensor is not None]
        read = [near[i] if i < len(tensors) else near[i].detach() for i in self.halves.read]
        self.seen = [(tensor, version_of(tensor)) for tensor in read]
        return values

    def reads(self) -> list[Tensor]:
        """The tensors by which it holds what backward reads."""
        return [*(self.saved or ()), *(tensor for tensor, _ in self.seen)]

    def handed(self) -> list[Tensor]:
        """What of its inputs and outputs is still there."""
        return [tensor for ref in self._handed if (tensor := ref()) is not None]

    def _forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.recording is not None:
            return self.recording.forward(tensors)  # what backward needs lies in the recording
        with self._alone():
            return list(self._run(self.halves.forward, [*tensors, *self.floats]))

    def backward(self, tangents: list[Tensor | None], gradients: Sequence[Tensor | None], keep: bool) -> list[Tensor]:
        """The gradients, given the tangents, whose list is emptied; the saved values are gone afterwards, unless they
        shall be kept.

        Raises:
            MemgraphError: they are gone already.
            RuntimeError: one of them has been changed in place since.
            RecordingError: they shall be kept, and lie in a recording, whose backward takes their bytes.
        """
        if self.saved is None:
            raise MemgraphError(
                "this step has been differentiated already, and what it had saved is gone; "
                "call backward(retain_graph=True) the first time to go through it twice"
            )
        if keep and self.recording is not None:
            raise RecordingError(
                "backward(retain_graph=True) goes through what forward saved twice, and a recorded step keeps it for "
                "one backward only; compile without cuda_graphs= for this"
            )
        refuse_changed(self.seen)
        assert self.halves.backward is not None
        saved = list(self.saved) if keep else self.saved
        if keep:
            self.beyond = "retain_graph=True kept what backward lets go"
            self.clock = None  # which knows of one backward
        else:
            self.saved, self.seen = None, []
        given = [_like(fake, tangent) for fake, tangent in zip(self.halves.tangents, tangents, strict=True)]
        if self.meter is not None:
            self.leaving = Leaving(self._came(tangents), self.meter.gone)
        tangents.clear()
        saved += [*self.floats, *given, *gradients]  # type: ignore[list-item]
        with self.wall:
            if self.recording is not None:
                results = self.recording.backward(given)
            else:
                del given
                with self._alone():
                    results = list(self._run_backward(self.halves.backward, saved))
        self.ended = True
        return results

    def times(self) -> Times | None:
        """What the flight took, if that was measured to the end."""
        if self.clock is None or not self.ended:
            return None
        moved = (self.lease.moved,) if self.lease is not None else ()
        return Times(self.clock.ops, self.clock.us, moved)

    @property
    def took(self) -> Wall | None:
        """What it took as a whole, if it was one like all others: neither measured nor timed op by op, and alone."""
        like_others = self.meter is None and self.clock is None and not self.shared and not self.beyond
        return self.wall if self.ended and like_others and isinstance(self.wall, Wall) else None

    def land(self) -> Allocation | None:
        """Let running copies end, give the room back, and say what was allocated, if that was measured to the end."""
        self.saved = None
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.give_back()
        meter, self.meter = self.meter, None
        return meter.allocated() if meter is not None and self.ended else None

    def __del__(self) -> None:
        self.land()

    def _run(self, half: fx.GraphModule, values: list[Any]) -> Iterable[Tensor]:
        if self.clock is not None:
            return self.clock.run(half, values)
        if self.leaving is not None:
            return noting(half, self.leaving)(half, values)
        return half.forward(values)

    def _run_backward(self, half: fx.GraphModule, values: list[Any]) -> Iterable[Tensor]:
        if not finds_nan():
            return self._run(half, values)
        self.beyond, self.clock = "torch's anomaly mode looked at each gradient", None
        return run_checked(half, values, self.halves.names)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run a half: casts are in the graph already, and autograd has nothing to see."""
        with (
            running(self.lease, self.sent, self.update, self.exchange, self.coming),
            torch.no_grad(),
            torch._C._DisableAutocast(),
            torch._C._AutoDispatchBelowAutograd(),
            self.explained(),
        ):
            yield


def _like(fake: Tensor, tangent: Tensor | None) -> Tensor:
    """A tangent as the graph was captured with it: zeros for none, and with the strides of the output."""
    if tangent is not None and _fits(fake, tangent):
        return tangent
    shaped = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return shaped.zero_() if tangent is None else shaped.copy_(tangent)


def _fits(fake: Tensor, tangent: Tensor) -> bool:
    """Whether the graph reads a tangent as it came."""
    return tangent.stride() == fake.stride()
