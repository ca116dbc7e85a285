"""Choose the submodules that run as they are, because they can't be traced.

    layers.2.mlp asks for a tensor's value   ->   layers.2.mlp is opaque: its real calls are recorded
    it returns a view of its argument        ->   layers.2 is opaque instead

The whole module can't be opaque: nothing would be left to plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..errors import CaptureError
from ..guards.attribute_snapshot import AttributeSnapshot
from ..opaque.part import drop, refuse_backward
from ..opaque.recorder import NotOpaqueError, Recorder
from ..system.frames import module_running
from .call import Call


class OpaqueParts:
    """The opaque submodules of one capture, and why they are."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.reasons: dict[nn.Module, tuple[str, str]] = {}
        self._paths = {child: path for path, child in module.named_modules()}
        self._causes: dict[nn.Module, CaptureError] = {}

    def add(self, error: CaptureError) -> None:
        """Make the submodule opaque that an error comes from; raise the error if there is none.

        A submodule that can't be opaque is replaced by the one around it.
        """
        if isinstance(error, NotOpaqueError):
            cause = self._causes[error.module]
            around = self._around(error.module)
            if around is None:
                cause.add_note(str(error))
                raise cause from None
            self._choose(around, cause)
            return
        running = module_running((error.__cause__ or error).__traceback__, self.module)
        if running is None or running[1] is self.module or running[1] in self._causes:
            raise error
        self._choose(running[1], error)

    def recorded(self, call: Call) -> Recorder | None:
        """Run the plain forward, and return the recorded calls; None if no submodule is opaque."""
        if not self.reasons:
            return None
        recorder = Recorder(self.reasons)
        with recorder.recording(), _unchanged(call), saved_tensors_hooks(drop, refuse_backward):
            call.run(call.tensors)
        return recorder

    def _choose(self, module: nn.Module, cause: CaptureError) -> None:
        inside = set(module.modules())
        self.reasons = {other: reason for other, reason in self.reasons.items() if other not in inside}
        self._causes[module] = cause
        self.reasons[module] = self._paths[module], str(cause).partition("\n")[0]

    def _around(self, module: nn.Module) -> nn.Module | None:
        """Return the innermost submodule that has this one, and a forward."""
        path = self._paths[module]
        while path:
            path = path.rpartition(".")[0]
            around = self.module.get_submodule(path)
            if path and type(around).forward is not nn.Module.forward:
                return around
        return None


@contextmanager
def _unchanged(call: Call) -> Iterator[None]:
    """Restore generators, attributes and buffers at the end of a block."""
    buffers = [(buffer, buffer.clone()) for buffer in call.module.buffers()]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(AttributeSnapshot(call.module, call.tensors).restored())
        stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tuple(call.tensors)))
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
