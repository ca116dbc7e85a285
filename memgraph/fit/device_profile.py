"""Figures of a device that is not here, read from a file.

read_profile("h200")   ->   DeviceProfile("h200", "cuda", 141 GB, 989 TFLOP/s in bfloat16, 4.8 TB/s, ...)
read_profile("my.json")   ->   the same of a file, as `memgraph doctor --profile my.json` writes it

A file has rates per second. Those of `profiles/` name the document that each figure is published in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from passes import Link, Machine

from ..profile.roofline import Rates
from ..system.device import CUDA_BLOCK

FOLDER = Path(__file__).parent / "profiles"
KINDS = {"cpu": "disk", "cuda": "host"}  # with the tier of each
PER_US = 1e-6  # of a second
CONTEXT = 500_000_000  # bytes of a GPU that CUDA takes before any tensor, at least


@dataclass(frozen=True)
class DeviceProfile:
    """A device, in bytes, bytes per second and operations per second.

    Attributes:
        kind: "cpu" or "cuda", as in torch.
        memory: bytes of the device.
        flops: peak operations per second, by the name of a dtype.
        bandwidth: bytes of the device's memory that are read or written per second.
        link: fields of `passes.Link`, with bytes per second `out` and `back`; without them nothing is offloaded.
        libraries: bytes that cuBLAS keeps.
        op_us: microseconds that the smallest op takes.
        workspaces: workspace of ops by name, as a share of the bytes that each reads and writes.
        capability: compute capability of a CUDA device, by which torch chooses kernels; None if unknown.
        multiprocessors: of a CUDA device.
        sources: the document, or the measurement, that each figure is from.
    """

    name: str
    kind: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    title: str = ""
    link: Mapping[str, Any] = field(default_factory=dict)
    libraries: int = 0
    op_us: float = 0.0
    workspaces: Mapping[str, float] = field(default_factory=dict)
    capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """Bytes that a storage's size is rounded up to."""
        return CUDA_BLOCK if self.kind == "cuda" else 1

    @property
    def held(self) -> int:
        """Bytes that torch's allocator may hold of a GPU; 0 for a CPU, whose memory the system gives out."""
        return self.memory - CONTEXT if self.kind == "cuda" else 0

    def rates(self, dtype: torch.dtype) -> Rates:
        """Return the rates of ops on values of a dtype; of one without a figure, those of float32."""
        flops = self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])
        return Rates(flops * PER_US, self.bandwidth * PER_US)

    def machine(self, budget: int) -> Machine:
        """Return the machine that steps are planned for."""
        rates = {name: self.link.get(name, 0.0) * PER_US for name in ("out", "back")}
        rest = {name: value for name, value in self.link.items() if name not in rates}
        return Machine(budget, self.kind, KINDS[self.kind], Link(**rates, **rest))

    def to_json(self) -> str:
        """Return the text of a file."""
        return json.dumps(asdict(self), indent=1) + "\n"


def profile_names() -> list[str]:
    """Return the devices that have a file here."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def read_profile(name: str) -> DeviceProfile:
    """Return the profile of a name, or of the path of a file.

    Raises:
        ValueError: there is no such profile, or the file holds none.
    """
    known = FOLDER / f"{name.lower()}.json"
    file = known if name.lower() in profile_names() else Path(name)
    if not file.is_file():
        raise ValueError(
            f"there is no profile of the device {name!r}: there are {', '.join(profile_names())}, and files that "
            "`memgraph doctor --profile FILE` writes"
        )
    try:
        return _checked(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} holds no profile of a device: {error}; profiles/h200.json is an example") from error


def _checked(given: Any) -> DeviceProfile:
    """Return the profile of these fields.

    Raises:
        TypeError, ValueError: a field is missing, unknown or of no use.
    """
    if not isinstance(given, dict):
        raise TypeError("a JSON object was wanted")
    if unknown := set(given) - {each.name for each in fields(DeviceProfile)}:
        raise TypeError(f"unknown {', '.join(sorted(unknown))}")
    if given.get("capability") is not None:
        major, minor = map(int, given["capability"])
        given = {**given, "capability": (major, minor)}
    profile = DeviceProfile(**given)
    if profile.kind not in KINDS:
        raise ValueError(f"kind is {profile.kind!r}, and is one of {', '.join(KINDS)}")
    if "float32" not in profile.flops:
        raise ValueError("flops has no figure for float32")
    for what, number in {"memory": profile.memory, "bandwidth": profile.bandwidth, **profile.flops}.items():
        if not isinstance(number, int | float) or number <= 0:
            raise ValueError(f"{what} is {number!r}, and has to be more than 0")
    profile.machine(1)  # the fields of its link are known
    return profile
