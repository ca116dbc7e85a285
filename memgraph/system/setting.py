"""The setting in which something was measured: all that a price depends on besides the op, in words.

    setting(cpu)  ->  "torch 2.13.0+cpu ... | AMD EPYC ... | AVX512 | 2 cores | OMP_NUM_THREADS=2"

Whatever changes which kernels run, or how fast, has to be in it, or in the op's own key: a price that was measured
elsewhere would be a wrong time, and a workspace a broken promise.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

import torch

METHOD = 6  # of measuring; another one finds other numbers
ABOUT_CPU = {
    *("vendor_id", "cpu family", "model", "model name", "stepping", "cache size"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
}
# By these the libraries below torch choose kernels and threads, mostly when they are loaded.
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
    ),
)


@functools.cache
def environment_key(device: torch.device) -> str:
    """The device, torch and its libraries, and what was asked of them: one text, by which prices are kept."""
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
    """The version of the driver of NVIDIA's GPUs, which torch does not tell; empty where that can't be asked."""
    text = ctypes.create_string_buffer(80)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        known = not library.nvmlInit_v2() and not library.nvmlSystemGetDriverVersion(text, len(text))
    except (OSError, AttributeError):
        return ""
    return text.value.decode() if known else ""


def _cpu() -> tuple[str, ...]:
    """What the first processor is."""
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return platform.machine(), platform.processor()
    pairs = [line.partition(":") for line in first.splitlines()]
    return platform.machine(), *(
        f"{key.strip()} {value.strip()}" for key, _, value in pairs if key.strip() in ABOUT_CPU
    )
