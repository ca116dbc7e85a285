"""The figures of this machine's CPU, measured: a profile that is compared with what really runs.

measured_profile("/var/tmp")   ->   DeviceProfile("cpu", "cpu", 25 GB, 78 GFLOP/s in float32, 9 GB/s, ...)

Measure the workspace of convolutions on this CPU, as a share of the bytes that they read and write.

aten.convolution_backward.default   ->   1.13 of its tensors' bytes: the largest share of some usual forms

Their library copies tensors into layouts of its own, which no shape tells. A share is an estimate, not a limit.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from passes import Machine

from ..profile.machine_profile import measure_links
from ..profile.memory_meter import measure_peak, resident_bytes
from ..profile.roofline import measured_rates
from ..storage.spill_file import Folder, mount_description, spill_folder
from ..system.device import CPU, memory_nbytes
from ..system.timer import shortest_us
from .device_profile import PER_US, DeviceProfile

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
aten = torch.ops.aten
# Batch, channels in and out, side, kernel, stride, groups: of residual nets, depthwise ones, and of patches.
FORMS = (
    (4, 32, 64, 32, 3, 1, 1), (4, 64, 64, 16, 1, 1, 1), (4, 64, 64, 16, 7, 1, 64), (4, 3, 64, 64, 8, 8, 1),
    (8, 64, 128, 8, 3, 2, 1),
)  # fmt: skip


def measured_profile(folder: Folder = None) -> DeviceProfile:
    """Measure this machine's CPU, and the disk of a folder to offload to."""
    rates = {str(dtype).removeprefix("torch."): measured_rates(CPU, dtype) for dtype in DTYPES}
    machine = measure_links(Machine(1), "disk", CPU, folder)
    link = asdict(machine.link) | {name: round(getattr(machine.link, name) / PER_US) for name in ("out", "back")}
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}, {platform.machine()}"
    sources = {
        "flops": f"a product of two square matrices, {threads}",
        "bandwidth": "a copy within memory, bytes read and written",
        "memory": "the memory of the machine, or the limit of its control group",
        "link": f"copies to {mount_description(spill_folder(folder))}",
        "op_us": "an addition to one element",
        "workspaces": "convolutions of some usual forms, the largest share",
    }
    return DeviceProfile(
        "cpu", "cpu", memory_nbytes(CPU), {name: round(rate.flops / PER_US) for name, rate in rates.items()},
        round(rates["float32"].nbytes / PER_US), "this machine's CPU", link, op_us=_op_us(),
        workspaces=convolution_shares(), sources=sources,
    )  # fmt: skip


def _op_us() -> float:
    one = torch.zeros(1)
    return round(shortest_us(partial(torch.add, one, one), CPU), 2)


def convolution_shares() -> dict[str, float]:
    """Return the largest share of each op over `FORMS`."""
    shares = {str(aten.convolution.default): 0.0, str(aten.convolution_backward.default): 0.0}
    with torch.no_grad():
        for rows, channels, filters, side, kernel, stride, groups in FORMS:
            x, w = torch.ones(rows, channels, side, side), torch.ones(filters, channels // groups, kernel, kernel)
            rest = [stride, stride], [kernel // 2] * 2, [1, 1], False, [0, 0], groups
            forward = partial(aten.convolution.default, x, w, None, *rest)
            y = forward()
            backward = partial(aten.convolution_backward.default, y, x, w, None, *rest, [True, True, False])
            for op, run, reads in (
                (aten.convolution.default, forward, (x, w)), (aten.convolution_backward.default, backward, (x, w, y))
            ):  # fmt: skip
                shares[str(op)] = max(shares[str(op)], _share(run, reads))
    return {name: round(share, 3) for name, share in shares.items()}


def _share(run: Callable[[], Any], reads: Sequence[Tensor]) -> float:
    result, allocated = measure_peak(run)
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if allocated is None:  # a profiler runs
        return 0.0
    return max(0, allocated.peak - resident_bytes(made)) / resident_bytes([*made, *reads])
