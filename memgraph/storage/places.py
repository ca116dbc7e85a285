"""The tier that has the tensors of each owner: a parameter, its gradient, or its states.

places = Places({"host": FileSpace(None, 4 << 30), "disk": FileSpace(folder)})
places.note(weight, "disk")
places.of(weight)      ->   the folder
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .file_space import FileSpace
from .mapped_storage import BufferLocation, BufferSlice, MappedBuffer, TensorSpec
from .spill_file import whole_pages


class Places:
    """The locations of a device's tiers by name, the nearest first, and the tier of each owner."""

    def __init__(self, locations: Mapping[str, BufferLocation]) -> None:
        self.locations = dict(locations)
        self._names: dict[Hashable, str] = {}
        self._of_tensors: MutableMapping[Any, str] = WeakIdKeyDictionary()

    def at(self, tier: str) -> BufferLocation:
        """Return the location of a tier; of the nearest for an empty name."""
        return self.locations[tier or next(iter(self.locations))]

    def of(self, owner: Hashable) -> BufferLocation:
        """Return the location for the tensors of an owner: the farthest if no plan names one, as it has most room."""
        return self.at(self._tiers_of(owner).get(owner, list(self.locations)[-1]))

    def note(self, owner: Hashable, tier: str) -> None:
        """Let the tensors of an owner go to a tier from now on; those that are somewhere stay there."""
        self._tiers_of(owner)[owner] = tier

    def _tiers_of(self, owner: Hashable) -> MutableMapping[Any, str]:
        return self._of_tensors if isinstance(owner, Tensor) else self._names


def location_of(where: BufferLocation | Places, owner: Hashable = None) -> BufferLocation:
    """Return where the tensors of an owner go."""
    return where.of(owner) if isinstance(where, Places) else where


def note_tiers(where: BufferLocation | Places, tiers: Mapping[Any, str]) -> None:
    """Let the tensors of these owners go to these tiers from now on."""
    if isinstance(where, Places):
        for owner, tier in tiers.items():
            where.note(owner, tier)


def map_tensors(
    specs: Sequence[TensorSpec], where: BufferLocation | Places, owners: Sequence[Hashable]
) -> list[tuple[Tensor, BufferSlice]]:
    """Return mapped tensors and their slices, those of one location in one file.

    Plans of several kinds of calls may name more than a tier has room for: what comes last goes to the farthest then.

    Raises:
        SpillError: a folder has no space for them.
        PinnedError: the host has none.
    """
    groups: dict[int, tuple[BufferLocation, list[int]]] = {}
    room: dict[int, int] = {}
    for i, owner in enumerate(owners):
        location = location_of(where, owner)
        if isinstance(where, Places) and isinstance(location, FileSpace):
            needed, free = whole_pages(specs[i].nbytes), room.setdefault(id(location), location.free_nbytes)
            if needed <= free:
                room[id(location)] -= needed
            else:
                location = location_of(where)
        groups.setdefault(id(location), (location, []))[1].append(i)
    found: dict[int, tuple[Tensor, BufferSlice]] = {}
    for location, numbers in groups.values():
        buffer = MappedBuffer([specs[i] for i in numbers], location)
        found |= {i: (buffer.tensor(k), buffer.slice(k)) for k, i in enumerate(numbers)}
    return [found[i] for i in range(len(specs))]
