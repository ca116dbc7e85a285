"""The device of a module, and what the options mean there.

budget="8GB", offload="auto", a module on a GPU   ->   Target(cuda:0, 8000000000 bytes, tiers ("host",), ...)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..capture.call.require_strided import require_strided_module
from ..errors import CaptureError
from ..options.compile_options import CompileOptions
from ..profile.memory_meter import resident_bytes
from ..runtime.cuda_graphs import Recorder, recorder_of
from ..storage.places import Places
from ..storage.tiers import open_places, tier_names
from ..system.byte_sizes import budget_nbytes
from ..system.device import device_of, hold_to


@dataclass(frozen=True, eq=False)
class Target:
    """Where a step runs.

    Attributes:
        budget: bytes of the device.
        tiers: the names of the tiers, the nearest first; none if nothing may be offloaded.
        location: where parameters and optimizer state are allocated in the tiers.
        recorder: makes what records CUDA graphs; None if steps run op by op.
        lowers: the options ask for Inductor on this device.
    """

    device: torch.device
    budget: int
    tiers: tuple[str, ...]
    location: Places
    recorder: Callable[[], Recorder] | None
    lowers: bool

    @classmethod
    def of(cls, device: torch.device, owned_nbytes: int, options: CompileOptions) -> Target:
        """Return the target of a module with so many bytes of parameters and buffers on `device`."""
        budget = budget_nbytes(options.budget, device, owned_nbytes)
        tiers = tier_names(options.offload, device, options.host, options.disk)
        if options.strict:
            hold_to(budget, device)
        recorder = recorder_of(device) if options.cuda_graphs else None
        location = open_places(tiers, device, options.spill_dir, options.host, options.disk)
        return cls(device, budget, tiers, location, recorder, asks_to_lower(options.lower, device))


def asks_to_lower(option: str | None, device: torch.device) -> bool:
    """Return True if Inductor is to compile ops on a device."""
    return option == "inductor" or (option == "auto" and device.type == "cuda")


class ModuleTarget:
    """The target of one module; a new one if the module is moved to another device."""

    def __init__(self, module: nn.Module, options: CompileOptions) -> None:
        """Raises: as `current`."""
        self.module, self.options = module, options
        self.latest = self._on(self._device())

    def current(self) -> Target:
        """Return the target where the module is now.

        Raises:
            CaptureError: parameters have no shapes yet, or tensors are not dense.
            ValueError: tensors are on several devices, or an option does not fit the device.
        """
        device = self._device()
        if self.latest.device != device:
            self.latest = self._on(device)
        return self.latest

    def _device(self) -> torch.device:
        owned = owned_tensors(self.module)
        if any(map(is_lazy, owned)):
            raise CaptureError("parameters have no shape yet: run the lazy module once before it is compiled")
        require_strided_module(self.module)
        return device_of(owned)

    def _on(self, device: torch.device) -> Target:
        return Target.of(device, owned_nbytes(self.module), self.options)


def owned_nbytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers on the device."""
    return resident_bytes(owned_tensors(module))


def owned_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]
