"""Which of a module's parameters, and of their gradients and states, live beyond the device.

    residence.settle({"parameter fc.weight": like, "gradient fc.weight": like})
        fc.weight      its values are on disk, and the Parameter is mapped there
        its gradient   has a place on disk, for when there is one

Everybody else goes on with the same Parameter objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..errors import UpdateError
from ..storage.mapped_storage import BufferLocation, BufferSlice, MappedBuffer, buffer_slice_of, tensor_spec_of
from ..storage.transfer import begin_reload
from ..tensors.aliasing import describe_overlap
from ..tensors.layout import alias_storage_as

PARAMETER, GRADIENT = "parameter", "gradient"
Key = tuple[str, str]  # one of the two, and the parameter's name


class StatePlacement:
    """The far homes of one module."""

    def __init__(self, module: nn.Module, where: BufferLocation = None) -> None:
        self.module, self.where = module, where
        self.gradients: dict[str, Tensor] = {}

    def settle(self, homes: Mapping[Key, Tensor], states: Iterable[dict[str, object]] = ()) -> dict[Key, BufferSlice]:
        """The places of these, which are brought there if they are elsewhere: also when the caller has re-bound them.

        `homes` shows what each looks like; `states` are of parameters whose states live far as well.

        Raises:
            SpillError: the disk does not take them.  Nothing has changed.
            UpdateError: a parameter that is elsewhere lies in the memory of another, or of a buffer.
        """
        named = dict(self.module.named_parameters())
        parameters = [named[name] for name in _names(homes)]
        strangers = [parameter for parameter in parameters if buffer_slice_of(parameter.detach()) is None]
        gradients = {name: like for (kind, name), like in homes.items() if kind == GRADIENT}
        wanted = {name: like for name, like in gradients.items() if not self._has_room(name, like)}
        if strangers and (shared := describe_overlap(named | dict(self.module.named_buffers()), _names(homes))):
            raise UpdateError(f"{shared}, or compile anew, which leaves them on the device")
        if strangers or wanted:
            self._move(strangers, wanted)
        self._move_states(states)
        return {(kind, name): self._place(kind, name, named) for kind, name in homes}

    def leave(self, names: Iterable[str], states: Iterable[dict[str, object]]) -> None:
        """Bring parameters and states back to the device."""
        named = dict(self.module.named_parameters())
        for name in names:
            named[name].data = named[name].detach().clone()
        for state in states:
            state |= {
                key: value.clone() for key, value in state_tensors(state).items() if buffer_slice_of(value) is not None
            }

    def adopt(self, name: str, gradient: Tensor) -> None:
        """Bring a gradient that the caller has made to its home; it stays the caller's object."""
        if buffer_slice_of(gradient) != buffer_slice_of(self.gradients[name]):
            if self.is_held(name):
                self.gradients |= self.apart({name: gradient})
            home = self.gradients[name]
            gradient.data = alias_storage_as(home, gradient if gradient.is_contiguous() else home).copy_(gradient)

    def is_held(self, name: str) -> bool:
        """Whether somebody has a tensor in the home of a gradient: then the next one may not lie there."""
        # One is the tensor here, and one the storage's own object.
        return torch._C._storage_Use_Count(self.gradients[name].untyped_storage()._cdata) > 2

    def apart(self, likes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New places on disk for gradients.

        Raises:
            SpillError: the disk has no room for them.
        """
        home = MappedBuffer([tensor_spec_of(like) for like in likes.values()], self.where)
        return {name: home.tensor(i) for i, name in enumerate(likes)}

    def _has_room(self, name: str, like: Tensor) -> bool:
        """Whether a gradient has a home, and that is none from when its parameter had another dtype or shape, nor of
        before a fork."""
        home = self.gradients.get(name)
        return home is not None and home.nbytes == like.nbytes and buffer_slice_of(home) is not None

    def _move(self, parameters: list[nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
        moved = begin_reload([parameter.detach() for parameter in parameters], self.where)
        if gradients:
            self.gradients |= self.apart(gradients)
        for parameter, mapped in zip(parameters, moved, strict=True):
            parameter.data = mapped

    def _move_states(self, states: Iterable[dict[str, object]]) -> None:
        """All into one home: each has a file of its own, of which a process may open so many."""
        near = [
            (one, key, value)
            for one in states
            for key, value in state_tensors(one).items()
            if buffer_slice_of(value) is None
        ]
        for (one, key, _), moved in zip(near, begin_reload([value for *_, value in near], self.where), strict=True):
            one[key] = moved

    def _place(self, kind: str, name: str, named: Mapping[str, nn.Parameter]) -> BufferSlice:
        place = buffer_slice_of(named[name].detach() if kind == PARAMETER else self.gradients[name])
        assert place is not None
        return place


def _names(homes: Iterable[Key]) -> list[str]:
    return [name for kind, name in homes if kind == PARAMETER]


def state_tensors(state: Mapping[str, object]) -> dict[str, Tensor]:
    """What a state has in it that is no single number."""
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
