"""Offload parameters, gradients and states of a module, and keep track of where they are.

    placement.place({("parameter", "fc.weight"): fake, ("gradient", "fc.weight"): fake})
        fc.weight      its values are on disk, and the Parameter is mapped from there
        its gradient   has a slice on disk, for when there is one

The Parameter objects stay the same for everyone else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ..errors import UpdateError
from ..storage.file_space import FileSpace
from ..storage.mapped_storage import BufferAllocator, BufferLocation, BufferSlice, buffer_slice_of, tensor_spec_of
from ..storage.places import Places, location_of, map_tensors
from ..storage.transfer import offload_tensors
from ..storage.weight_file import WeightFiles, discard
from ..tensors.aliasing import describe_overlap, held_elsewhere, sharing_storage
from ..tensors.layout import alias_storage_as
from ..tensors.state_leaves import is_movable, state_leaves

PARAMETER, GRADIENT = "parameter", "gradient"
Key = tuple[str, str]  # one of the two, and the parameter's name
Location = BufferLocation | Places
OwnedState = tuple[Hashable, dict[str, object]]  # a state, and the owner by which its tier is known


class StatePlacement:
    """The offloaded state of one module."""

    def __init__(self, module: nn.Module, location: Location = None) -> None:
        self.module, self.location = module, location
        self.gradients: dict[str, Tensor] = {}  # mapped
        self.weight_files = WeightFiles()
        self._left_nbytes = 0

    def place(
        self, fakes: Mapping[Key, Tensor], states: Iterable[OwnedState] = (),
        saved: Iterable[Tensor] = (),
    ) -> dict[Key, BufferSlice]:  # fmt: skip
        """Return the slices of these, and offload what is not there yet, or was re-bound by the user.

        `fakes` show the layout of each; `states` are offloaded as well; `saved` are tensors of runs that are open.

        Raises:
            SpillError: the disk does not take them. Nothing has changed.
            UpdateError: a parameter shares memory with another one, with a buffer, or with a tensor of someone else.
        """
        named = dict(self.module.named_parameters())
        names = _parameter_names(fakes)
        self.weight_files.keep({name: named[name].detach() for name in names if self._may_stay(name, named[name])})
        moved = {name: named[name] for name in names if buffer_slice_of(named[name].detach()) is None}
        gradients = {name: fake for (kind, name), fake in fakes.items() if kind == GRADIENT}
        missing = {name: fake for name, fake in gradients.items() if not self._has_slice(name, fake)}
        owned = named | dict(self.module.named_buffers())
        if moved:
            self._refuse_move(moved, owned, saved)
        if moved or missing:
            self._offload(moved, missing, owned)
        self._offload_states(states)
        return {(kind, name): self._slice(kind, name, named) for kind, name in fakes}

    def _may_stay(self, name: str, parameter: nn.Parameter) -> bool:
        """Return True if a parameter may stay in a file of weights: it is frozen, and goes to a disk."""
        location = location_of(self.location, (PARAMETER, name))
        in_memory = isinstance(location, BufferAllocator) or (isinstance(location, FileSpace) and location.is_memory)
        return not parameter.requires_grad and not in_memory

    def take_left_nbytes(self) -> int:
        """Return the bytes of tensors that have left a storage since the last call: a meter sees them as new."""
        nbytes, self._left_nbytes = self._left_nbytes, 0
        return nbytes

    def move_to_device(self, names: Iterable[str], states: Iterable[dict[str, object]]) -> None:
        """Copy parameters and states back to the device for good, but no parameter whose memory others hold by now."""
        named = dict(self.module.named_parameters())
        moved = {name: named[name] for name in names}
        for name in moved.keys() - held_elsewhere(moved, self.module.buffers()):
            named[name].data = named[name].detach().clone()
        for state in states:
            for leaf in state_leaves(state):
                if buffer_slice_of(leaf.tensor) is not None:
                    leaf.put(leaf.tensor.clone())

    def _refuse_move(self, moved: Mapping[str, Tensor], owned: Mapping[str, Tensor], saved: Iterable[Tensor]) -> None:
        if empty := [name for name, parameter in moved.items() if parameter.numel() and not parameter.data_ptr()]:
            raise UpdateError(
                f"{empty[0]} has no memory, as its storage was resized to 0 bytes: give it its values back"
            )
        again = "or compile again, which leaves them on the device"
        if shared := describe_overlap(owned, moved):
            raise UpdateError(f"{shared}, {again}")
        if held := held_elsewhere(moved, (*owned.values(), *saved)):
            raise UpdateError(
                f"a tensor outside of the module holds the memory of {held[0]} too, as fully_shard, a flat parameter "
                "or a state_dict() that is kept do, and to offload it, as planned, would free no memory and separate "
                f"the two: release that tensor, give the parameter a clone of its data, {again}"
            )

    def adopt_gradient(self, name: str, gradient: Tensor) -> None:
        """Offload a gradient that the user has set; it stays the user's object."""
        if buffer_slice_of(gradient) != buffer_slice_of(self.gradients[name]):
            if self.is_referenced(name):
                self.gradients |= self.new_buffers({name: gradient})
            mapped = self.gradients[name]
            gradient.data = alias_storage_as(mapped, gradient if gradient.is_contiguous() else mapped).copy_(gradient)

    def is_referenced(self, name: str) -> bool:
        """Return True if the user has a tensor over the slice of a gradient, which the next one must not overwrite."""
        # One reference is the tensor here, and one the storage's own object.
        return torch._C._storage_Use_Count(self.gradients[name].untyped_storage()._cdata) > 2

    def new_buffers(self, fakes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Allocate new slices for gradients.

        Raises:
            SpillError: the disk has no space for them.
        """
        owners = [(GRADIENT, name) for name in fakes]
        mapped = map_tensors([tensor_spec_of(fake) for fake in fakes.values()], self.location, owners)
        return {name: tensor for name, (tensor, _) in zip(fakes, mapped, strict=True)}

    def _has_slice(self, name: str, fake: Tensor) -> bool:
        """Return True if a gradient has a slice that was made for its present size and in this process."""
        mapped = self.gradients.get(name)
        return mapped is not None and mapped.nbytes == fake.nbytes and buffer_slice_of(mapped) is not None

    def _offload(
        self, moved: Mapping[str, Tensor], gradients: Mapping[str, Tensor], owned: Mapping[str, Tensor]
    ) -> None:
        owners = [(PARAMETER, name) for name in moved]
        offloaded = offload_tensors([parameter.detach() for parameter in moved.values()], self.location, owners)
        if gradients:
            self.gradients |= self.new_buffers(gradients)
        left = sharing_storage(moved, owned)  # views of one storage, as a flat vector, which is to be freed
        before = [parameter.data for parameter in moved.values()]
        for parameter, mapped in zip(moved.values(), offloaded, strict=True):
            parameter.data = mapped
        for tensor in left:
            tensor.data = tensor.detach().clone()
            self._left_nbytes += tensor.nbytes
        discard(before)

    def _offload_states(self, states: Iterable[OwnedState]) -> None:
        """Offload all states of a tier to one buffer: each has an open file, and their number is limited."""
        leaves = [(leaf, owner) for owner, state in states for leaf in state_leaves(state) if is_movable(leaf)]
        resident = [(leaf, owner) for leaf, owner in leaves if buffer_slice_of(leaf.tensor) is None]
        tensors, owners = [leaf.tensor for leaf, _ in resident], [owner for _, owner in resident]
        for (leaf, _), mapped in zip(resident, offload_tensors(tensors, self.location, owners), strict=True):
            leaf.put(mapped)

    def _slice(self, kind: str, name: str, named: Mapping[str, nn.Parameter]) -> BufferSlice:
        slice = buffer_slice_of(named[name].detach() if kind == PARAMETER else self.gradients[name])
        assert slice is not None
        return slice


def _parameter_names(keys: Iterable[Key]) -> list[str]:
    return [name for kind, name in keys if kind == PARAMETER]
