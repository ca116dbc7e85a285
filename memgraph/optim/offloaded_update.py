"""The update of an optimizer for whose parameters the far tier is home, or for their gradients or states.

update = FarUpdate(optimizer, location=folder)
update.peak_nbytes(trained)                   what it takes on the device, in windows
FarStates(update, parameters).begin()    from now on optimizer.step() runs in windows

How large a window is depends on what is trained and not on the budget, so that the smallest budget for which there is
a plan is the same whatever was asked for. Windows are as large as the step that ran last was planned with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from passes import Trace

from ..errors import UpdateError
from ..storage.async_copy import CopyLog
from ..storage.mapped_storage import BufferLocation
from ..storage.pinned_storage import PinnedBufferAllocator
from .elementwise import unsupported_reason
from .host_step import host_update_rate, reserve_windows
from .optimizer_profiler import states_nbytes
from .state_parts import Owner, StatePart, is_large
from .streamed_update import StreamedUpdate
from .update_cost import STATE
from .window_memory import OffloadedTensors, WindowBytes, window_bytes
from .windowed_optimizer import WindowedOptimizer

SMALLEST, LARGEST = 1 << 18, 16 << 20  # bytes of a window
LARGEST_ON_GPU = (
    128 << 20
)  # the largest of a GPU's: its link brings 16 MiB in less time than the host takes to ask for them
SHARE = 64  # of what is trained is one


class OffloadedUpdate:
    """The update of an optimizer, or of none: then it is the caller's own affair.  `fused`: updates run in backward,
    where somebody else sees to it that each is in windows.  `hosts`: the host may step on states that live there."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        fused: bool = False,
        location: BufferLocation = None,
        host_update: bool = False,
    ) -> None:
        self.optimizer, self.location, self.fused, self.host_update = optimizer, location, fused, host_update
        self.windowed: WindowedOptimizer | None = None
        self.streamed_copies: CopyLog = {}  # the copies of the latest updates in backward
        self.offloaded_owners: set[Owner] = set()
        self.host_owners: set[Owner] = set()  # the parameters that are stepped on the host
        self.reserved = 0  # bytes of a window there
        self.planned_window: int | None = None  # bytes of a window in the latest step for which something is far

    @property
    def window(self) -> int:
        """Bytes of a window, for who plans an update of what is trained now."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        trained = [p for group in groups for p in group["params"] if p.requires_grad]
        largest = LARGEST_ON_GPU if any(p.device.type == "cuda" for p in trained) else LARGEST
        return min(largest, max(SMALLEST, sum(p.nbytes for p in trained) // SHARE))

    @property
    def current(self) -> int:
        """Bytes of a window, for who updates: what was frozen or thawed since the plan changes nothing."""
        return self.window if self.planned_window is None else self.planned_window

    @property
    def copies(self) -> CopyLog:
        """The copies of the latest update in windows, or of the latest backward that has updated."""
        return self.streamed_copies if self.windowed is None else self.windowed.copies

    @property
    def can_stream(self) -> bool:
        """Whether any of the state may live far."""
        return self.unsupported_reason is None

    @property
    def unsupported_reason(self) -> str | None:
        """Why nothing of the state can live far with this optimizer, and what to do."""
        if self.optimizer is None:
            return None
        return unsupported_reason(self.optimizer, lambda parameter: parameter.requires_grad)

    def peak_nbytes(self, trained: Collection[Tensor]) -> int:
        """What an update allocates at most, whatever lives far."""
        return max((taken.total for taken in self._taken(trained)), default=0)

    def nbytes_between(self, trained: Collection[Tensor]) -> int:
        """What is there at most between two updates in backward, of which both move their windows meanwhile."""
        return max((taken.between for taken in self._taken(trained)), default=0) if self.fused else 0

    def _taken(self, trained: Collection[Tensor]) -> Sequence[WindowBytes]:
        """What the next update takes, and any later one, if all that is large lives far."""
        if self.optimizer is None:
            return ()
        return window_bytes(
            self.optimizer, self.window, OffloadedTensors(is_large, is_large, is_large), trained, self.fused
        )

    def check_fits_on_device(self, there: int, budget: float) -> None:
        """Raise what is known of the optimizer before there is a step, if nothing of the state can live far with it;
        `there`: the bytes of parameters and buffers.

        Raises:
            UpdateError: its update can't be planned, or all that has to stay is more than the budget.
        """
        if self.optimizer is None or (obstacle := self.unsupported_reason) is None:
            return
        needed = there + states_nbytes(self.optimizer)
        if needed > budget:
            raise UpdateError(
                f"{obstacle}. Parameters, buffers and all states are {needed} bytes, over the budget of {budget}"
            )

    def host_rate(self, parts: Sequence[StatePart]) -> float:
        """Bytes of states that the host steps on per microsecond; 0.0 if it may not, or is the device itself."""
        if not self.host_update or self.optimizer is None or not isinstance(self.location, PinnedBufferAllocator):
            return 0.0
        return host_update_rate(self.optimizer, parts, self.window)

    def install(self) -> None:
        """Let the optimizer step in windows."""
        if self.windowed is not None:
            self.windowed.nbytes = self.current
        elif self.optimizer is not None and not self.fused:
            far, hosted = self.offloaded_owners.__contains__, self.host_owners.__contains__
            self.windowed = WindowedOptimizer(self.optimizer, self.current, far, self.location, hosted)

    def update_on_host(self, parameters: Collection[Owner]) -> None:
        """Step on these on the host from now on.

        Raises:
            PinnedError: it has no room for two windows.
        """
        if parameters and self.reserved < self.current and isinstance(self.location, PinnedBufferAllocator):
            reserve_windows(self.location, self.current, self)
            self.reserved = self.current
        self.host_owners.update(parameters)

    def stream(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> StreamedUpdate:
        """Updates in windows for gradients that come one after the other, in this order."""
        relay = StreamedUpdate(optimizer, parameters, self.current, self.offloaded_owners.__contains__, self.location)
        self.streamed_copies = relay.copies
        return relay

    def states(self, owners: Collection[Owner]) -> list[dict[str, object]]:
        """The states of these parameters, as far as there are any."""
        states = self.optimizer.state if self.optimizer is not None else {}
        return [states[owner] for owner in owners if isinstance(owner, Tensor) and owner in states]


@dataclass(frozen=True, eq=False)
class OffloadedStates:
    """Whose states one step has far, which of them are stepped there, and the update that does so."""

    update: OffloadedUpdate
    owners: tuple[Owner, ...] = ()
    host_owners: tuple[Owner, ...] = ()
    window: int | None = None  # bytes of one, as it was planned

    @classmethod
    def of(cls, update: OffloadedUpdate, trace: Trace, parts: Sequence[StatePart]) -> OffloadedStates:
        """What a planned step says of `parts` of the states."""
        states = [
            (op, parts[int(op.name.removeprefix(f"{STATE}_"))]) for op in trace.ops if op.far and op.fn == "state"
        ]
        far = tuple(owner for _, part in states for owner in part.owners)
        hosted = tuple(owner for op, part in states if op.hosted for owner in part.owners)
        return cls(update, far, hosted, update.window)

    @property
    def is_active(self) -> bool:
        """Whether the update makes new states where they belong."""
        update = self.update
        known = update.offloaded_owners.issuperset(self.owners) and update.host_owners.issuperset(self.host_owners)
        return known and update.planned_window == self.window

    def activate(self) -> list[dict[str, object]]:
        """Let the update run in windows, and have new states made where they belong; the states that are there."""
        self.update.planned_window = self.window
        self.update.install()
        self.update.offloaded_owners.update(self.owners)
        self.update.update_on_host(self.host_owners)
        return self.states()

    def states(self) -> list[dict[str, object]]:
        """The states, as far as there are any."""
        return self.update.states(self.owners)

    def deactivate(self, kept: Collection[Owner]) -> list[dict[str, object]]:
        """New states are made on the device, but for those of `kept`; the states that are there and belong there."""
        gone = set(self.owners) - set(kept)
        self.update.offloaded_owners.difference_update(gone)
        self.update.host_owners.difference_update(self.host_owners)  # a plan that takes this one's place says so anew
        return self.update.states(gone)
