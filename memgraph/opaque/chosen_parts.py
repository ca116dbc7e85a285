"""Choose the submodules that run as they are, because they can't be traced.

    layers.2.mlp asks for a tensor's value   ->   layers.2.mlp is opaque: its real calls are recorded
    it returns a view of its argument        ->   layers.2 is opaque instead

The whole module can't be opaque: nothing would be left to plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import CaptureError
from ..graph.provenance import PATH
from ..guards.refused_collectives import RefusedCollectiveError
from ..system.frames import module_running
from .recorder import Around, NotOpaqueError, Recorder
from .refused_dropout import RefusedDropoutError


class OpaqueParts:
    """The opaque submodules of one capture, and why they are."""

    def __init__(
        self, module: nn.Module, wanted: bool | Sequence[str], as_in_eager: Around, preferred: Sequence[str] = ()
    ) -> None:
        """`preferred` are opaque if they can be."""
        self.module, self.wanted, self.as_in_eager = module, wanted, as_in_eager
        self.recorder: Recorder | None = None
        self.reasons: dict[nn.Module, tuple[str, str]] = {}
        self._paths = {child: path for path, child in module.named_modules()}
        self._causes: dict[nn.Module, CaptureError] = {}
        self._alike = set[nn.Module]()  # opaque because another one of their class is, or preferred
        self._named = set[nn.Module]()
        self._traced = set[nn.Module]()  # of those alike, those that can't be opaque
        for name in () if isinstance(wanted, bool) else wanted:
            # The module may be inside of one that adds the loss.
            path = next(path for path in self._paths.values() if path == name or path.endswith(f".{name}"))
            self._named.add(module.get_submodule(path))
            self._choose(module.get_submodule(path), CaptureError(f"opaque= has {name!r}"))
        for path in preferred:
            self._prefer(module.get_submodule(path), "it asks for values that differ from call to call")

    def add(self, error: CaptureError) -> None:
        """Make the submodule opaque that an error comes from; raise the error if there is none.

        A submodule that can't be opaque is replaced by the one around it.
        """
        if self.wanted is False or isinstance(error, RefusedCollectiveError | RefusedDropoutError):
            raise error
        if isinstance(error, NotOpaqueError) and error.module in self._alike:
            self._forget(error.module)
            return
        if isinstance(error, NotOpaqueError):
            cause = self._causes[error.module]
            around = self._around(error.module)
            if around is None and error.module in self._named:
                raise CaptureError(f"{cause}, but {error}") from error
            if around is None:
                cause.add_note(str(error))
                raise cause from None
            self._choose(around, cause)
            self._choose_alike(around)
            return
        module = self._source(error)
        if module in self.reasons:  # the one around it runs some of it by itself, in a backward of its own
            module = self._around(module)
        if module is None or module is self.module or module in self._causes:
            raise error
        self._choose(module, error)
        self._choose_alike(module)

    def _source(self, error: CaptureError) -> nn.Module | None:
        """Return the submodule that an error comes from, or that has the attribute which it is about."""
        if error.attribute:
            paths = [path for path in self._paths.values() if error.attribute.startswith(f"{path}.")]
            return self.module.get_submodule(max(paths, key=len, default=""))
        cause = error.__cause__ or error
        if (path := getattr(cause, PATH, None)) in self._paths.values():
            return self.module.get_submodule(str(path))
        running = module_running(cause.__traceback__, self.module)
        return running[1] if running is not None else None

    def close(self) -> None:
        """Free the recorded tensors, and the frames that errors hold."""
        self._causes.clear()
        if self.recorder is not None:
            self.recorder.close()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of the opaque submodules in a block."""
        if not self.reasons:
            yield
            return
        recorder = Recorder(self.reasons, self.as_in_eager)
        with recorder.recording():
            yield
        self.recorder = recorder

    def _choose_alike(self, module: nn.Module) -> None:
        """Make submodules of the same class opaque as well: each trace finds only one, and layers are many."""
        for other in self._paths:
            if _is_alike(other, module):
                self._prefer(other, self.reasons[module][1])

    def _prefer(self, module: nn.Module, reason: str) -> None:
        near = any(module in chosen.modules() or chosen in module.modules() for chosen in self.reasons)
        if not near and module not in self._traced:
            self._alike.add(module)
            self.reasons[module] = self._paths[module], reason

    def _forget(self, module: nn.Module) -> None:
        """Trace a submodule that was opaque because of its class."""
        self._alike.remove(module)
        self._traced.add(module)
        del self.reasons[module]
        self.recorder = None

    def _choose(self, module: nn.Module, cause: CaptureError) -> None:
        if self.recorder is not None:
            self.recorder.close()
        self.recorder = None
        inside = set(module.modules())
        self.reasons = {other: reason for other, reason in self.reasons.items() if other not in inside}
        self._causes[module] = cause
        self._alike.discard(module)
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


def _is_alike(one: nn.Module, other: nn.Module) -> bool:
    """Return True for modules of one class; of torch's own classes, if both average over all batches."""
    if type(one) is not type(other):
        return False
    return not type(one).__module__.startswith("torch.") or (_averages(one) and _averages(other))


def _averages(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.momentum is None
