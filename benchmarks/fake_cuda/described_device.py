"""Run Python with a CUDA device that is described by a profile, and not there.

    python -m benchmarks.fake_cuda.described_device h200 -m pytest -m fake_cuda

Before: torch's CUDA build finds no device, and takes no op that asks for one, as each fused attention does.
After:  torch sees a device of these properties. Its allocator, streams and events work, and no kernel can be launched.

This is the one place where properties of a device are made up; they are those of `memgraph/fit/profiles`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).with_suffix(".c")
VARIABLE = "MEMGRAPH_DESCRIBED"


class NoDescribedDeviceError(Exception):
    """A device can't be described here, for the reason in the message."""


def main(name: str, *arguments: str) -> None:
    """Replace this process by Python with these arguments, which sees the device of a profile."""
    os.execve(sys.executable, [sys.executable, *arguments], environment(name))


def is_described() -> bool:
    """Return True if this process sees a described device."""
    return VARIABLE in os.environ and "LD_PRELOAD" in os.environ


def environment(name: str) -> dict[str, str]:
    """Return the environment of a process that sees the device of a profile; build the library.

    Raises:
        NoDescribedDeviceError: a compiler, torch's CUDA build or a property of the device is missing.
    """
    from memgraph.fit.device_profile import read_profile

    profile = read_profile(name)
    if profile.kind != "cuda" or profile.capability is None:
        raise NoDescribedDeviceError(
            f"the profile {name!r} is not of a CUDA device with `capability` and `multiprocessors`; take h200"
        )
    facts = profile.memory, *profile.capability, profile.multiprocessors, profile.title or profile.name
    preloaded = {VARIABLE: " ".join(map(str, facts)), "LD_PRELOAD": str(_built())}
    return os.environ | preloaded | {"CUDA_MODULE_LOADING": "LAZY"}


@contextmanager
def packing_without_cudnn() -> Iterator[None]:
    """Let weights of recurrent nets be packed into one storage, as cuDNN does when they are moved to its device."""
    import torch

    def pack(weights: Sequence[Tensor], *layout: object) -> Tensor:
        flat = torch.empty(sum(w.numel() for w in weights), dtype=weights[0].dtype, device=weights[0].device)
        begin = 0
        for weight in weights:
            weight.set_(flat.untyped_storage(), begin, weight.shape)  # type: ignore[call-overload]
            begin += weight.numel()
        return flat

    plain = torch._cudnn_rnn_flatten_weight
    torch._cudnn_rnn_flatten_weight = pack  # type: ignore[assignment]
    try:
        yield
    finally:
        torch._cudnn_rnn_flatten_weight = plain


def _built() -> Path:
    """Return the library, built from its source.

    Raises:
        NoDescribedDeviceError: there is no compiler, or no CUDA build of torch.
    """
    import torch

    compiler = shutil.which("cc") or shutil.which("gcc")
    triton = find_spec("triton")
    if compiler is None or triton is None or triton.origin is None or not torch.backends.cuda.is_built():
        raise NoDescribedDeviceError(
            f"a described device wants a C compiler ({compiler}), triton's headers ({triton}) and torch's CUDA build "
            f"(this is {torch.__version__}): run `make fake-cuda`"
        )
    headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    folder = Path(gettempdir()) / f"memgraph-described-{os.getuid()}-{SOURCE.stat().st_mtime_ns}"
    folder.mkdir(exist_ok=True)
    library = folder / "libcuda.so.1"
    if not library.exists():
        partial = library.with_name(f"{os.getpid()}.so")
        options = ["-O1", "-shared", "-fPIC", f"-I{headers}", f"-Wl,-soname,{library.name}"]
        subprocess.run([compiler, *options, str(SOURCE), "-o", str(partial)], check=True)
        partial.rename(library)
    return library


if __name__ == "__main__":
    main(*sys.argv[1:])
