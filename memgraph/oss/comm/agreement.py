"""Compare what the ranks were given, so that a difference is an error on all of them and not a hang.

    rank 0: group 0 parameter 1: float32[4, 5] ...      AgreementError: the ranks disagree on group 0 parameter 1:
    rank 1: group 0 parameter 1: float32[5, 4] ...  ->  float32[4, 5] ... on rank 0, float32[5, 4] ... on rank 1; ...

Each rank describes its arguments in lines of text. One small collective compares a digest of them. The lines are only
sent if digests differ.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ...errors import AgreementError, MemgraphError
from .rank_group import SHOWN, all_texts, equal_texts
from .watchdog import CollectiveWatchdog

CHUNK = 1 << 22  # elements that are copied to host memory at once
OPTIMIZER = "the optimizer"  # subject of the first of `parameter_lines`


def check_agreement(watchdog: CollectiveWatchdog, lines: Sequence[str], advice: str) -> None:
    if len(watchdog.members) == 1:
        return
    text = "\n".join(line.replace("\n", " ") for line in lines).encode()
    digests = equal_texts(watchdog, hashlib.sha256(text).digest(), "comparison of what the ranks were given")
    if len(set(digests)) > 1:
        texts = all_texts(watchdog, text, "exchange of what differs")
        raise AgreementError(_difference([each.decode().split("\n") for each in texts], watchdog.members, advice))


@contextmanager
def report_errors(watchdog: CollectiveWatchdog, subject: str, advice: str) -> Iterator[None]:
    """Report an error of this rank to the others, which wait in `check_agreement` for lines that begin with `subject`.

    This rank raises its own error.
    """
    try:
        yield
    except Exception as error:
        with suppress(MemgraphError):
            check_agreement(watchdog, [f"{subject}: {type(error).__name__}: {error}"], advice)
        raise


def parameter_lines(optimizer: str, groups: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Describe what has to be equal on all ranks: class, options, order, shapes, types, strides and values."""
    yield f"{OPTIMIZER}: {optimizer}"
    for place, group in enumerate(groups):
        options = (f"{name}={format_option(value)}" for name, value in sorted(group.items()) if name != "params")
        yield f"the options of group {place}: {', '.join(options)}"
        for position, parameter in enumerate(group["params"]):
            yield f"group {place} parameter {position}: {describe(parameter)}"
        yield f"the end of group {place}: {len(group['params'])} parameters"


def format_option(value: object) -> str:
    """Format an option as text that is the same in every process."""
    if isinstance(value, Tensor):
        return f"tensor({value.tolist()}, {value.dtype})"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(format_option, value))})"
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def describe(parameter: Tensor) -> str:
    """Return type, shape, strides and a checksum of the values."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    frozen = "" if parameter.requires_grad else " frozen"
    spec = f"{dtype}{list(parameter.shape)} strides {list(parameter.stride())} on {parameter.device.type}{frozen}"
    return spec if parameter.is_meta else f"{spec}, with values of checksum {checksum(parameter):08x}"


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bits, copied to host memory in chunks."""
    flat = tensor.detach().reshape(-1)
    crc = 0
    for begin in range(0, flat.numel(), CHUNK):
        chunk = flat[begin : begin + CHUNK].cpu().contiguous()
        crc = zlib.crc32(chunk.view(torch.uint8).numpy().data, crc)
    return crc


def _difference(texts: Sequence[Sequence[str]], ranks: Sequence[int], advice: str) -> str:
    lines = next(lines for lines in zip_longest(*texts) if len(set(lines)) > 1)
    name = next(line for line in lines if line is not None).partition(": ")[0]
    each = "; ".join(f"{_short(line, name)} on {_on(lines, line, ranks)}" for line in dict.fromkeys(lines))
    return f"the ranks disagree on {name}: {each}. {advice}"


def _short(line: str | None, name: str) -> str:
    return "nothing" if line is None else line.removeprefix(f"{name}: ")[:SHOWN]


def _on(lines: Sequence[str | None], line: str | None, ranks: Sequence[int]) -> str:
    equal = [str(rank) for rank, other in zip(ranks, lines, strict=True) if other == line]
    return f"rank{'s' if len(equal) > 1 else ''} {', '.join(equal)}"
