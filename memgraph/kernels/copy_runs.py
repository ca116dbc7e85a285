"""Move many runs of numbers in one launch, each from one place to another, and cast them on the way.

    move([(a, staging[:5]), (b, staging[5:9])])  ->  staging holds a and b in its own format

What packs, unpacks, gathers and scatters is this (`pack.py`).  A launch reads a table with a line for every CHUNK of
every run: where it is read, where it is written, how long it is, and its place among all, by which it is rounded.
Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .autotune import Way, launch, way_of
from .formats import FORMATS, narrowed, rounded, widened
from .random_bits import SEEDS, noise, noise_of

UNIT = 128  # numbers by which is said how the columns of the table go on within a run
CHUNK = 64 * UNIT  # numbers in a line of the table: a multiple of every block
RAW = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}  # what is not cast moves as integers of its size
Pair = tuple[Tensor, Tensor]  # from, into: flat, and of as many numbers


def move(pairs: Sequence[Pair], seed: int | None = None) -> None:
    """Copy the first of each pair into the second; with a `seed`, what is cast is rounded up or down by chance.

    Raises:
        ValueError: a pair is not flat, not of equal length, or can't be cast.
    """
    for of, into in pairs:
        check(of, into, seed)
    if pairs:
        move_by(way_of("move", pairs[0][0].device, sum(of.nbytes for of, _ in pairs)), pairs, seed)


def move_by(way: Way | None, pairs: Sequence[Pair], seed: int | None = None) -> None:
    """`move`, in a way of the caller's choice."""
    ready(way, pairs, seed)()


def ready(way: Way | None, pairs: Sequence[Pair], seed: int | None = None) -> Callable[[], None]:
    """What moves as often as it is called: what a launch needs to know of the addresses is found out once."""
    if way is None:
        return partial(move_twin, pairs, seed)
    found = list(_launches(pairs, seed))

    def run() -> None:
        for table, constants in found:
            launch(_kernel, way, len(table), table.device, table, len(table), seed or 0, **constants)

    return run


def move_twin(pairs: Sequence[Pair], seed: int | None = None) -> None:
    """`move` in plain torch, run by run."""
    first = 0
    for of, into in pairs:
        if of.dtype is not into.dtype:
            chance = None if seed is None else noise_of(first, of.numel(), seed, of.device)
            into.copy_(rounded(of, into.dtype, chance), non_blocking=True)
        else:
            into.copy_(of, non_blocking=True)
        first += of.numel()


def check(of: Tensor, into: Tensor, seed: int | None) -> None:
    """
    Raises:
        ValueError: they are not flat, not of one length, or can't be cast; or the seed is none.
    """
    if of.shape != into.shape or any(x.dim() != 1 or not x.is_contiguous() for x in (of, into)):
        raise ValueError(f"moves go between flat tensors of one length, not {_form(of)} and {_form(into)}")
    if of.dtype is not into.dtype and not (of.dtype in FORMATS and into.dtype in FORMATS):
        raise ValueError(f"{of.dtype} can't be cast to {into.dtype} on its way; these can be: {[*map(str, FORMATS)]}")
    if of.itemsize not in RAW:
        raise ValueError(f"{of.dtype} takes {of.itemsize} bytes; what is moved takes {', '.join(map(str, RAW))}")
    if seed is not None and not 0 <= seed < SEEDS:
        raise ValueError(f"seed={seed}: give a number from 0 to {SEEDS - 1}")


def _form(x: Tensor) -> str:
    return f"{tuple(x.shape)} with strides {x.stride()}"


def _launches(pairs: Sequence[Pair], seed: int | None) -> Iterator[tuple[Tensor, dict[str, object]]]:
    """One for all pairs of the same two formats whose addresses vectors of 16 bytes may begin at."""
    device = next((x.device for pair in pairs for x in pair if x.is_cuda), torch.device("cpu"))
    groups: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[int, ...]]] = {}
    first = 0
    for of, into in pairs:
        if device.type == "cuda" and any(x.device != device and not x.is_pinned() for x in (of, into)):
            raise ValueError(f"a kernel on {device} reaches what lies there and pinned memory, no tensor elsewhere")
        key = of.dtype, into.dtype, (of.data_ptr() | into.data_ptr()) % 16 == 0
        groups.setdefault(key, []).append((of.numel(), of.data_ptr(), into.data_ptr(), first))
        first += of.numel()
    for (source, target, aligned), runs in groups.items():
        table = lines(runs, (UNIT * source.itemsize, UNIT * target.itemsize, UNIT), device)
        cast = source is not target
        constants: dict[str, object] = {
            "FROM": FORMATS[source].name if cast else "",
            "INTO": FORMATS[target].name if cast else "",
            "OF": FORMATS[source].carrier if cast else RAW[source.itemsize],
            "TO": FORMATS[target].carrier if cast else RAW[target.itemsize],
        }
        if len(table):
            yield table, {**constants, "STOCHASTIC": cast and seed is not None, "ALIGNED": aligned}


def lines(runs: Sequence[tuple[int, ...]], growth: tuple[int, ...], device: torch.device) -> Tensor:
    """The table: for each chunk its count, and then what is said of the run, grown by `growth` for each UNIT before it.

    It goes to the device without waiting for it.
    """
    whole = torch.tensor(runs, dtype=torch.int64).reshape(-1, 1 + len(growth))
    chunks = (whole[:, 0] + CHUNK - 1) // CHUNK
    table = whole.repeat_interleave(chunks, dim=0)
    at = CHUNK * (torch.arange(len(table)) - (chunks.cumsum(0) - chunks).repeat_interleave(chunks))
    table[:, 0] = (table[:, 0] - at).clamp(max=CHUNK)
    table[:, 1:] += (at // UNIT)[:, None] * torch.tensor(growth)
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


@triton.jit(do_not_specialize=["rows", "seed"])
def _kernel(
    table, rows, seed,
    FROM: tl.constexpr, INTO: tl.constexpr, OF: tl.constexpr, TO: tl.constexpr,
    STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = table + row * 4
        count = tl.load(line).to(tl.int32)
        of = tl.load(line + 1).to(tl.pointer_type(OF))  # pyright: ignore[reportArgumentType]
        into = tl.load(line + 2).to(tl.pointer_type(TO))  # pyright: ignore[reportArgumentType]
        place = tl.load(line + 3)
        if ALIGNED:
            of, into = tl.multiple_of(of, 16), tl.multiple_of(into, 16)
        for at in range(0, count, BLOCK):
            i = at + tl.arange(0, BLOCK)
            # A whole block is moved without a mask, or nothing of it would be a vector.
            if at + BLOCK <= count:
                _tile(of, into, i, None, place, seed, FROM, INTO, STOCHASTIC)
            else:
                _tile(of, into, i, i < count, place, seed, FROM, INTO, STOCHASTIC)


@triton.jit
def _tile(
    of, into, i, inside, place, seed,
    FROM: tl.constexpr, INTO: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    code = tl.load(of + i, mask=inside)
    if FROM != INTO:
        chance = i
        if STOCHASTIC:
            chance = noise(place + i, seed)
        code = narrowed(widened(code, FROM), chance, INTO, STOCHASTIC)
    tl.store(into + i, code, mask=inside)
