"""Choose the submodules that run as they are, because they can't be traced.

    layers.2.mlp asks for a tensor's value   ->   layers.2.mlp is opaque: its real calls are recorded
    it returns a view of its argument        ->   layers.2 is opaque instead

The whole module can't be opaque: nothing would be left to plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

from ..errors import CaptureError
from ..graph.guard_ops import TOLIST
from ..opaque.recorder import NotOpaqueError, Recorder
from ..system.frames import module_running
from .python_random import allow_python_random
from .refuse_reseeding import allow_reseeding
from .user_checkpoint import eager_checkpoint


class OpaqueParts:
    """The opaque submodules of one capture, and why they are."""

    def __init__(self, module: nn.Module, wanted: bool | Sequence[str]) -> None:
        self.module, self.wanted = module, wanted
        self.recorder: Recorder | None = None
        self.reasons: dict[nn.Module, tuple[str, str]] = {}
        self._paths = {child: path for path, child in module.named_modules()}
        self._causes: dict[nn.Module, CaptureError] = {}
        for name in () if isinstance(wanted, bool) else wanted:
            # The module may be inside of one that adds the loss.
            path = next(path for path in self._paths.values() if path == name or path.endswith(f".{name}"))
            self._choose(module.get_submodule(path), CaptureError(f"opaque= has {name!r}"))

    def add(self, error: CaptureError) -> None:
        """Make the submodule opaque that an error comes from; raise the error if there is none.

        A submodule that can't be opaque is replaced by the one around it.
        """
        if self.wanted is False:
            raise error
        if isinstance(error, NotOpaqueError):
            cause = self._causes[error.module]
            around = self._around(error.module)
            if around is None:
                cause.add_note(str(error))
                raise cause from None
            self._choose(around, cause)
            return
        module = self._source(error)
        if module is None or module is self.module or module in self._causes:
            raise error
        self._choose(module, error)

    def _source(self, error: CaptureError) -> nn.Module | None:
        """Return the submodule that an error comes from, or that has the attribute which it is about."""
        if error.attribute:
            paths = [path for path in self._paths.values() if error.attribute.startswith(f"{path}.")]
            return self.module.get_submodule(max(paths, key=len, default=""))
        running = module_running((error.__cause__ or error).__traceback__, self.module)
        return running[1] if running is not None else None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of the opaque submodules in a block."""
        if not self.reasons:
            yield
            return
        recorder = Recorder(self.reasons, _as_in_eager)
        with recorder.recording():
            yield
        self.recorder = recorder

    def _choose(self, module: nn.Module, cause: CaptureError) -> None:
        self.recorder = None
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
def _as_in_eager() -> Iterator[None]:
    """Lift what capture forbids and replaces: a submodule that runs as it is may do all that it does in eager."""
    with (
        allow_reseeding(),
        allow_python_random(),
        eager_checkpoint(),
        mock.patch.object(torch.Tensor, "tolist", TOLIST),
    ):
        yield
