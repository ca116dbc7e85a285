"""The bytes that measuring may take beside what is on the device.

budget 30 MB, 10 MB are there    ->   20 MB
budget 30 MB, 128 MB are there   ->   -98 MB for ops;  8 MB for links and pages, as a sixteenth of what is there
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ..graph.nodes import tensors
from .library_workspaces import libraries_nbytes
from .memory_meter import resident_bytes


def room_nbytes(budget: int, device: torch.device, resident_nbytes: int, batch_nbytes: int) -> int:
    """Return the bytes that a budget leaves now, while nothing of the step exists but its batch.

    Workspaces of libraries are there too, from the first call of this on.

    Args:
        resident_nbytes: of the module, its gradients and its optimizer that are on the device now.
    """
    return budget - resident_nbytes - libraries_nbytes(device) - batch_nbytes


def batch_nbytes(inputs: Iterable[fx.Node]) -> int:
    """Return the bytes of a step's batch, by the nodes of its inputs."""
    batch = (node for node in inputs if node.meta["kind"] == "input")
    return resident_bytes(value for node in batch for value in tensors(node))


def rates_room(room: int | None, budget: int) -> int | None:
    """Return the bytes that measuring the machine may take, where the budget leaves `room`; None for any number.

    A model that will be offloaded may be more than the budget as it is. Planning can't keep the budget then, and takes
    a sixteenth of what is there beside it, since rates that are guessed make worse plans.
    """
    return room if room is None or room >= 0 else (budget - room) // 16
