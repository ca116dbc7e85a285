"""The modes in which a part runs as in eager, and the state that its Python changes.

with eager_modes(modes): ...       autograd and autocast, as they were when the part was recorded
before = PythonState.of(module)    generators and attributes
before.restore()                   as they were then
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..graph.recurrent.autograd_modes import autograd_keys
from ..guards.attribute_snapshot import AttributeSnapshot
from ..guards.what_ran import WhatRan
from ..system.own_generators import OwnStates, own_generators
from ..system.python_random import PythonRandom


@dataclass(frozen=True)
class Modes:
    """Grad mode, and autocast by device: whether it is on, its dtype, and whether it caches casts."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    caches: bool

    @classmethod
    def now(cls, device: torch.device) -> Modes:
        """Return the modes of this thread."""
        kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if torch.amp.is_autocast_available(kind)]
        autocast = ((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(torch.is_grad_enabled(), tuple(autocast), torch.is_autocast_cache_enabled())

    @property
    def casts_are_cached(self) -> bool:
        """True if a parameter that is used twice is cast once."""
        return self.caches and any(enabled for _, enabled, _ in self.autocast)

    def without_autocast(self) -> Modes:
        """Return the modes of backward."""
        return Modes(self.grad, tuple((kind, False, dtype) for kind, _, dtype in self.autocast), self.caches)


@contextmanager
def eager_modes(modes: Modes) -> Iterator[None]:
    """Run a block with autograd and autocast, whatever is off around it."""
    with ExitStack() as stack:
        stack.enter_context(autograd_keys(modes.grad))
        if modes.casts_are_cached:  # else the caller's own autocast would keep the casts
            stack.callback(torch.clear_autocast_cache)
        for kind, enabled, dtype in modes.autocast:
            stack.enter_context(torch.autocast(kind, dtype, enabled, modes.caches))
        yield


@dataclass(frozen=True, eq=False)
class PythonState:
    """State that a forward may change besides buffers: attributes of its module, variables, and random generators."""

    attributes: AttributeSnapshot
    generators: tuple[tuple[torch.Generator, torch.Generator], ...]  # and copies, which are no tensors
    python: PythonRandom
    own: OwnStates  # of `random` and numpy

    @classmethod
    def of(cls, module: nn.Module, tensors: Sequence[Tensor], ran: WhatRan | None = None) -> PythonState:
        """Return the state now; of torch's generators those of the devices of `tensors`, and the module's own."""
        states = tuple((generator, generator.clone_state()) for generator in _generators(module, tensors))
        return cls(AttributeSnapshot(module, ran=ran), states, PythonRandom(), OwnStates(own_generators(module)))

    def restore(self) -> None:
        """Set all back to this state."""
        self.attributes.restore()
        self.restore_generators()
        self.python.restore()
        self.own.restore()

    def restore_generators(self, drawn: Sequence[torch.Generator] = ()) -> None:
        """Set torch's generators back to this state, but those in `drawn`, unless they have another seed."""
        for generator, state in self.generators:
            if generator not in drawn or generator.initial_seed() != state.initial_seed():
                generator.set_state(state.get_state())

    @contextmanager
    def attributes_in_place(self, module: nn.Module) -> Iterator[None]:
        """Run a block with these attributes, and restore those from before."""
        now = AttributeSnapshot(module, ran=self.attributes.outer.ran)
        self.attributes.restore()
        try:
            yield
        finally:
            now.restore()

    @contextmanager
    def generators_in_place(self, module: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Run a block with these random generators, and restore those from before."""
        now = PythonState.of(module, tensors)
        self.restore_generators()
        self.python.restore()
        self.own.restore()
        try:
            yield
        finally:
            now.restore_generators()
            now.python.restore()
            now.own.restore()


def _generators(module: nn.Module, tensors: Sequence[Tensor]) -> list[torch.Generator]:
    devices = {tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"}
    attributes = (value for child in module.modules() for value in vars(child).values())
    own = [value for value in attributes if isinstance(value, torch._C.Generator)]
    return [torch.default_generator, *(torch.cuda.default_generators[i] for i in sorted(devices)), *own]
