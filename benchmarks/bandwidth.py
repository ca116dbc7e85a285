"""How many bytes a second the kernels read and write, beside a plain copy on the device, and the way that is fastest.

    rows(cuda)  ->  Figure("copy", 4200.0, "GB/s", 1.0), Figure("cast to bf16", 3900.0, "GB/s", 0.93), ...

The goal is 85 % of the copy.  On a CPU the twins run, which says nothing of a GPU, but that this program works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import torch

from benchmarks.beside import Figure
from benchmarks.laps import Laps
from memgraph.kernels import adamw, cast, copy_runs, direct, pack, scaled
from memgraph.kernels.autotune import Way, way_of

TIMES = 10
Case = tuple[Callable[[], object], int]  # what runs, and the bytes that it reads and writes


def rows(device: torch.device, nbytes: int = 512 << 20, tensors: int = 1000, laps: int = 20) -> Iterator[Figure]:
    """Every kernel on `nbytes` of float32, once its ways have been compared."""
    for room in (cast, pack, adamw, *([direct] if device.type == "cuda" else [])):
        room.compared(device)
    wide = torch.randn(nbytes // 4, device=device)
    yield from (_chosen(kernel, device, nbytes) for kernel in ("cast", "move", "adamw"))
    copy = 0.0
    for name, case in _cases(wide, tensors).items():
        rate = _rate(device, *case, laps)
        copy = copy or rate  # which is the first
        yield Figure(name, rate, "GB/s", rate / copy)


def _cases(wide: torch.Tensor, tensors: int) -> dict[str, Case]:
    count, device = len(wide), wide.device
    like = torch.empty_like(wide)
    thin = torch.empty(count, dtype=torch.bfloat16, device=device)
    pieces = list(wide.split(-(-count // tensors)))
    codes = torch.empty(count, dtype=torch.uint8, device=device)
    scales = torch.empty(scaled.groups(pieces), dtype=torch.uint8, device=device)
    p, g, m, v = (part[: count // 4] for part in (wide.clone(), wide, torch.zeros_like(wide), torch.zeros_like(wide)))
    packed = copy_runs.ready(way_of("move", device, wide.nbytes), pack.parts(pieces, thin))
    return {
        "copy": (lambda: like.copy_(wide), 8 * count),
        "cast to bf16": (lambda: cast.cast(wide, thin), 6 * count),
        "cast to bf16, by chance": (lambda: cast.cast(wide, thin, 1), 6 * count),
        "cast to f32": (lambda: cast.cast(thin, like), 6 * count),
        f"pack {len(pieces)} to bf16, made ready": (packed, 6 * count),
        f"pack {len(pieces)} to bf16": (lambda: pack.pack(pieces, thin), 6 * count),
        f"unpack {len(pieces)} to f32": (lambda: pack.unpack(thin, list(like.split(len(pieces[0])))), 6 * count),
        f"pack {len(pieces)} to e4m3": (lambda: scaled.narrow_scaled(pieces, codes, scales), 5 * count),
        "AdamW": (lambda: adamw.adamw(p, g, m, v, 1, adamw.Rule()), 28 * (count // 4)),
    }


def _rate(device: torch.device, run: Callable[[], object], nbytes: int, laps: int) -> float:
    """The median of so many laps; in each it runs again before it has ended, so that no launch is waited for."""

    def lap() -> None:
        for _ in range(TIMES):
            run()

    lap()
    return TIMES * nbytes / 1e6 / median(Laps(device).ms(lap) for _ in range(laps))


def _chosen(kernel: str, device: torch.device, nbytes: int) -> Figure:
    way: Way | None = way_of(kernel, device, nbytes)
    name = f"{kernel}: {way.block} numbers, {way.warps} warps" if way else f"{kernel}: the twin"
    return Figure(name, float(way.block if way else 0), "chosen")
