"""Run `optimizer.step()` when parameters, gradients or states are offloaded.

update = OffloadedUpdate(optimizer, location=folder)
update.peak_nbytes(trained)                      what it takes on the device, in windows
OffloadedStates(update, {parameter: tier}).activate()   from now on optimizer.step() runs in windows

The size of a window depends on what is trained and not on the budget, so that the smallest budget with a plan is the
same whatever budget was asked for. An update uses the window size that the step which ran last was planned with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from passes import Trace

from ..errors import UpdateError
from ..storage.async_copy import CopyLog
from ..storage.mapped_storage import BufferLocation
from ..storage.pinned_storage import PinnedBufferAllocator
from ..storage.places import Places, location_of, note_tiers
from ..tensors.parameter_groups import parameter_groups
from .elementwise import is_elementwise, is_exact
from .host_step import host_update_rate, reserve_windows
from .optimizer_profiler import states_nbytes
from .placement import OwnedState
from .step_on import groups_with
from .trained_parameters import Owner, is_large
from .trial_copy import parts_of
from .update_cost import state_value
from .update_unit import UpdateUnit, unit_of, unsupported_reason
from .window_memory import OffloadedTensors, WindowBytes, window_bytes
from .windowed_optimizer import WindowedOptimizer
from .windowed_update import WindowedUpdate

SMALLEST, LARGEST = 1 << 18, 16 << 20  # bytes of a window
LARGEST_ON_GPU = 128 << 20  # its link copies 16 MiB in less time than the host takes to launch the copy
SHARE = 64  # a window is this part of what is trained


class OffloadedUpdate:
    """The update of an optimizer; without one, the user updates.

    `fused`: updates run in backward, where `FusedUpdate` runs each in windows. `host_update`: the host may update
    parameters whose states are offloaded to it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | None, fused: bool = False, location: BufferLocation | Places = None,
        host_update: bool = False,
    ) -> None:  # fmt: skip
        self.optimizer, self.location, self.fused, self.host_update = optimizer, location, fused, host_update
        self.windowed: list[WindowedOptimizer] = []  # of the optimizer, or of those in a chain
        self.streamed_copies: CopyLog = {}  # of the latest updates in backward
        self.offloaded_owners: set[Owner] = set()
        self.host_owners: set[Owner] = set()  # the parameters that the host updates
        self.reserved = 0  # bytes of a window on the host
        self.planned_window: int | None = None  # bytes of a window in the latest step that offloads state

    @property
    def window(self) -> int:
        """Bytes of a window, for planning an update of what is trained now."""
        trained = [parameter for parameter in parameter_groups(self.optimizer) if parameter.requires_grad]
        return window_nbytes(trained, any(p.device.type == "cuda" for p in trained))

    @property
    def current(self) -> int:
        """Bytes of a window, for updating: parameters frozen since the plan change nothing."""
        return self.window if self.planned_window is None else self.planned_window

    @property
    def copies(self) -> CopyLog:
        """The copies of the latest update in windows, or of the latest backward that has updated."""
        logs = [each.copies for each in self.windowed] or [self.streamed_copies]
        return {move: [chunk for log in logs for chunk in log.get(move, ())] for move in set().union(*logs)}

    @property
    def can_stream(self) -> bool:
        """True if any of the state may be offloaded."""
        return self.unsupported_reason is None

    @property
    def unsupported_reason(self) -> str | None:
        """Why no state can be offloaded with this optimizer, and what to do."""
        if self.optimizer is None:
            return None
        return unsupported_reason(self.optimizer, lambda parameter: parameter.requires_grad)

    @property
    def _pinned(self) -> BufferLocation:
        """Where the host updates, if that is pinned memory."""
        return location_of(self.location)

    @property
    def chain(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that a chain has, or the optimizer."""
        return () if self.optimizer is None else parts_of(self.optimizer)

    def peak_nbytes(self, trained: Collection[Tensor]) -> int:
        """Return the most that an update allocates, whatever is offloaded."""
        return max((forecast.total for forecast in self._forecasts(trained)), default=0)

    def nbytes_between(self, trained: Collection[Tensor]) -> int:
        """Return the most that exists between two updates in backward, while the windows of both are copied."""
        return max((forecast.between for forecast in self._forecasts(trained)), default=0) if self.fused else 0

    def _forecasts(self, trained: Collection[Tensor]) -> Sequence[WindowBytes]:
        """The bytes of the next update and of any later one, if everything large is offloaded."""
        offloaded, found = OffloadedTensors(is_large, is_large, is_large), list[WindowBytes]()
        for part in self.chain:
            own = parameter_groups(part)
            of_part = [parameter for parameter in trained if parameter in own]
            whole = unit_of(part) is UpdateUnit.PARAMETER
            found += window_bytes(part, self.window, offloaded, of_part, self.fused, whole=whole)
        return found

    def check_fits_on_device(self, module_nbytes: int, budget: float) -> None:
        """
        Raises:
            UpdateError: the update can't be planned. Or no state can be offloaded, and all of it, with the parameters
                and buffers of `module_nbytes`, is over the budget.
        """
        if self.optimizer is None or (reason := self.unsupported_reason) is None:
            return
        needed = module_nbytes + states_nbytes(self.optimizer)
        if needed > budget:
            raise UpdateError(
                f"{reason}. Parameters, buffers and all states are {needed} bytes, over the budget of {budget}; "
                "where they fit, the first call names a budget that works"
            )

    def host_rate(self, states: Mapping[Owner, int]) -> float:
        """Return the bytes of states that the host updates per microsecond; 0.0 if it may not, or is the device."""
        if not self.host_update or self.optimizer is None or not isinstance(self._pinned, PinnedBufferAllocator):
            return 0.0
        if not is_elementwise(self.optimizer):
            return 0.0
        return host_update_rate(self.optimizer, states, self.window)

    def activate(self, owners: Collection[Owner], host_owners: Collection[Owner], window: int | None) -> None:
        """Update in windows from now on, and create the states of `owners` in the tier; the host updates some.

        Raises:
            PinnedError: the host has no memory for its two windows.
        """
        self.planned_window = window
        self.install()
        self.offloaded_owners.update(owners)
        if host_owners and self.reserved < self.current and isinstance(self._pinned, PinnedBufferAllocator):
            reserve_windows(self._pinned, self.current, self)
            self.reserved = self.current
        self.host_owners.update(host_owners)

    def install(self) -> None:
        """Replace the optimizer's step by one in windows of the current size."""
        if not self.windowed and not self.fused:
            self.windowed = [self._windowed(part) for part in self.chain]
        for each in self.windowed:
            each.nbytes, each.chain = self.current, self.windowed

    def _windowed(self, part: torch.optim.Optimizer) -> WindowedOptimizer:
        offloaded, on_host = self.offloaded_owners.__contains__, self.host_owners.__contains__
        whole = unit_of(part) is UpdateUnit.PARAMETER
        return WindowedOptimizer(part, self.current, offloaded, self.location, on_host, whole)

    def is_active(self, owners: Collection[Owner], host_owners: Collection[Owner], window: int | None) -> bool:
        """Return True if the update creates these states in the tier, in windows of this size."""
        is_offloaded = self.offloaded_owners.issuperset(owners) and self.host_owners.issuperset(host_owners)
        return is_offloaded and self.planned_window == window

    def deactivate(self, owners: Collection[Owner], host_owners: Collection[Owner]) -> None:
        """Create the states of `owners` on the device from now on, and update `host_owners` there."""
        self.offloaded_owners.difference_update(owners)
        self.host_owners.difference_update(host_owners)  # a plan that replaces this one adds its own

    def forget_removed(self) -> None:
        """Forget the parameters that the optimizer has no longer: their bytes would stay."""
        removed = {owner for owner in (*self.offloaded_owners, *self.host_owners) if isinstance(owner, Tensor)}
        removed.difference_update(parameter_groups(self.optimizer))
        self.offloaded_owners -= removed
        self.host_owners -= removed

    def stream(self, optimizer: torch.optim.Optimizer, parameters: Mapping[Tensor, int]) -> WindowedUpdate:
        """Start the update of these parameters, each with its group, whose gradients come in this order."""
        stream = WindowedUpdate(
            optimizer, self.current, self.offloaded_owners.__contains__, self.location,
            groups=groups_with(optimizer.param_groups, parameters), gradient_order=[*parameters],
        )  # fmt: skip
        self.streamed_copies = stream.copies
        return stream

    def states(self, owners: Collection[Owner]) -> list[OwnedState]:
        """Return the states of these parameters that exist."""
        return [(p, part.state[p]) for part in self.chain for p in owners if isinstance(p, Tensor) and p in part.state]


def window_nbytes(trained: Collection[Tensor], on_gpu: bool) -> int:
    """Return the bytes of a window of an update of these."""
    return min(LARGEST_ON_GPU if on_gpu else LARGEST, max(SMALLEST, sum(p.nbytes for p in trained) // SHARE))


def fake_update_nbytes(optimizer: torch.optim.Optimizer, fakes: Collection[Tensor], on_gpu: bool) -> int:
    """Return the most that an update of fake tensors allocates in windows, if everything large is offloaded.

    They are of the CPU, also where they stand for tensors of a GPU.
    """
    offloaded = OffloadedTensors(is_large, is_large, is_large)
    exact = (lambda fake: True) if on_gpu else is_exact
    return max(
        each.total for each in window_bytes(optimizer, window_nbytes(fakes, on_gpu), offloaded, fakes, exact=exact)
    )


@dataclass(frozen=True, eq=False)
class OffloadedStates:
    """The states that one planned step offloads, each with its tier, those that the host updates, and their update."""

    update: OffloadedUpdate
    tiers: Mapping[Owner, str] = field(default_factory=dict)
    host_owners: tuple[Owner, ...] = ()
    window: int | None = None  # bytes, as planned

    @classmethod
    def of(cls, update: OffloadedUpdate, trace: Trace, states: Iterable[Owner]) -> OffloadedStates:
        """Read from a planned step which of the states it offloads."""
        values = {state_value(i): owner for i, owner in enumerate(states)}
        found = [(op, values[op.name]) for op in trace.ops if op.offloaded and op.fn == "state"]
        tiers, host_owners = {owner: op.tier for op, owner in found}, tuple(owner for op, owner in found if op.on_host)
        return cls(update, tiers, host_owners, update.window)

    @property
    def owners(self) -> tuple[Owner, ...]:
        return tuple(self.tiers)

    @property
    def is_active(self) -> bool:
        return self.update.is_active(self.owners, self.host_owners, self.window)

    def activate(self) -> list[OwnedState]:
        """Update in windows from now on, and create new states in the tier; return the states that exist."""
        note_tiers(self.update.location, self.tiers)
        self.update.activate(self.owners, self.host_owners, self.window)
        return self.states()

    def states(self) -> list[OwnedState]:
        """Return the states that exist."""
        return self.update.states(self.owners)

    def deactivate(self, kept: Collection[Owner]) -> list[dict[str, object]]:
        """Create new states on the device, except for those of `kept`; return the states to bring back there."""
        dropped = set(self.owners) - set(kept)
        self.update.deactivate(dropped, self.host_owners)
        return [state for _, state in self.update.states(dropped)]
