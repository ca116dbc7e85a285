"""Time an update of state in pinned memory: through windows on the GPU, on the host, and half by each.

    rows(cuda)  ->  [Figure("update through the GPU", 41.0, "ms"), Figure("update on the host", 60.2, "ms", 1.47), ...]

Parameters, gradients and AdamW's states are in pinned memory, 16 bytes a parameter. Shares are of the first line.
"""

from __future__ import annotations

from collections.abc import Container
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.beside import Figure
from memgraph.optim.offloaded_update import LARGEST
from memgraph.optim.windowed_update import WindowedUpdate
from memgraph.storage.pinned_storage import PinnedBufferAllocator
from memgraph.storage.transfer import offload_tensors
from memgraph.system.timer import timed_us

LAPS = 5
COUNT, ELEMENTS = 16, 4 << 20  # 268 MB of parameters


def rows(device: torch.device, count: int = COUNT, elements: int = ELEMENTS) -> list[Figure]:
    """Measure each way; empty on a CPU, which is the host."""
    if device.type != "cuda":
        return []
    host = PinnedBufferAllocator(device)
    parameters = [nn.Parameter(torch.ones(elements, device=device)) for _ in range(count)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    _bring(parameters, host)
    ways = {"through the GPU": [], "on the host": parameters, "half by each": parameters[::2]}
    found = {name: _ms(optimizer, parameters, host, set(there)) for name, there in ways.items()}
    first = next(iter(found.values()))
    return [Figure(f"update {name}", ms, "ms", ms / first) for name, ms in found.items()]


def _bring(parameters: list[nn.Parameter], host: PinnedBufferAllocator) -> None:
    """Offload parameters to the host."""
    for parameter, home in zip(parameters, offload_tensors([each.detach() for each in parameters], host), strict=True):
        parameter.data = home


def _ms(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    host: PinnedBufferAllocator,
    there: Container[Tensor],
) -> float:
    """Return the milliseconds of an update; the first one makes states, and is not counted."""
    gradients = offload_tensors([torch.ones_like(parameter.detach()) for parameter in parameters], host)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient

    def update() -> None:
        with torch.no_grad():
            WindowedUpdate(optimizer, LARGEST, lambda _: True, host, on_host=lambda parameter: parameter in there).run()

    return median([timed_us(update, host.device)[1] / 1e3 for _ in range(LAPS + 1)][1:])
