"""Describe the environment that a measurement depends on, as a cache key.

    environment_key(cpu)  ->  "torch 2.13.0+cpu ... | AMD EPYC ... | AVX512 | 2 cores | OMP_NUM_THREADS=2"

Everything that changes which kernels run, or how fast, has to be in it or in the op's own key. Otherwise a cached time
would be wrong, and a cached workspace could break the budget.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

import torch

METHOD = 7  # version of the measuring code; a change of it invalidates the cache
ABOUT_CPU = {
    *("vendor_id", "cpu family", "model", "model name", "stepping", "cache size"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
}
# The libraries below torch choose kernels and threads by these, mostly when they are loaded.
VARIABLES = (
    *("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "MKLDNN_", "OMP_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_"),
    *(
        "CUBLAS",
        "CUDA_",
        "CUDNN_",
        "NVIDIA_",
        "PYTORCH_",
        "TORCH_CUDNN_",
        "TORCH_CUBLAS",
        "TORCH_BLAS_",
        "LD_PRELOAD",
        "MALLOC_",
        "THP_",
        "MEMGRAPH_POOL",
    ),
)


@functools.cache
def environment_key(device: torch.device) -> str:
    """Return the device, torch, its libraries and their settings as one text."""
    environment = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(VARIABLES))
    libraries = (torch.__version__, torch.version.git_version, torch.version.cuda, torch.version.hip)
    return " | ".join((f"method {METHOD}", f"torch {libraries}", *_hardware(device), *environment))


def _hardware(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return (*_cpu(), torch.backends.cpu.get_cpu_capability(), f"{len(os.sched_getaffinity(0))} cores")
    facts = torch.cuda.get_device_properties(device)
    versions = f"driver {driver()}, cuDNN {torch.backends.cudnn.version()}"
    return str(facts.name), f"{facts.major}.{facts.minor}", versions


def driver() -> str:
    """Return the version of NVIDIA's driver, which torch does not expose; empty if it is unknown."""
    text = ctypes.create_string_buffer(80)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        ok = not library.nvmlInit_v2() and not library.nvmlSystemGetDriverVersion(text, len(text))
    except (OSError, AttributeError):
        return ""
    return text.value.decode() if ok else ""


def _cpu() -> tuple[str, ...]:
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return platform.machine(), platform.processor()
    pairs = [line.partition(":") for line in first.splitlines()]
    return platform.machine(), *(
        f"{key.strip()} {value.strip()}" for key, _, value in pairs if key.strip() in ABOUT_CPU
    )
