"""The figures of this machine's CPU, measured: a profile that is compared with what really runs.

measured_profile("/var/tmp")   ->   DeviceProfile("cpu", "cpu", 25 GB, 78 GFLOP/s in float32, 9 GB/s, ...)
"""

from __future__ import annotations

import platform
from dataclasses import asdict
from functools import partial

import torch

from passes import Machine

from ..profile.machine_profile import measure_links
from ..profile.roofline import measured_rates
from ..storage.spill_file import Folder, mount_description, spill_folder
from ..system.device import CPU, memory_nbytes
from ..system.timer import shortest_us
from .device_profile import PER_US, DeviceProfile
from .workspace_shares import convolution_shares

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
