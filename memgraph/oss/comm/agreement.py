"""Ranks that were given different parameters are told so, each of them, before anything hangs or goes wrong.

    rank 0: group 0 parameter 1: float32[4, 5] ...      AgreementError: the ranks disagree on group 0 parameter 1:
    rank 1: group 0 parameter 1: float32[5, 4] ...  ->  float32[4, 5] ... on rank 0, float32[5, 4] ... on rank 1; ...

Every rank writes down what it was given, a line for each thing. One small collective compares a digest of the lines;
only if these differ are the lines themselves sent around, as text.
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
from .texts import equal_texts, texts
from .watchdog import CollectiveWatchdog

CHUNK = 1 << 22  # elements that are brought to host memory at once
SHOWN = 300  # characters of a line in an error
OPTIMIZER = "the optimizer"  # what the first of `parameter_lines` is about


def check_agreement(watchdog: CollectiveWatchdog, lines: Sequence[str], advice: str) -> None:
    """Compare these lines on all ranks; a collective.

    Raises:
        AgreementError: they are not the same everywhere; says on which ranks the first line that differs is what, and
            what to do.
        CollectiveError: a rank did not come.
    """
    if len(watchdog.members) == 1:
        return
    text = "\n".join(line.replace("\n", " ") for line in lines).encode()
    digests = equal_texts(watchdog, hashlib.sha256(text).digest(), "comparison of what the ranks were given")
    if len(set(digests)) > 1:
        found = texts(watchdog, text, "exchange of what differs")
        raise AgreementError(_difference([each.decode().split("\n") for each in found], watchdog.members, advice))


@contextmanager
def report_errors(watchdog: CollectiveWatchdog, what: str, advice: str) -> Iterator[None]:
    """Around what comes before `agree` over lines of which the first is about `what`: what fails here on a rank, the
    others are told there.

    The rank itself raises its own error.
    """
    try:
        yield
    except Exception as error:
        with suppress(MemgraphError):
            check_agreement(watchdog, [f"{what}: {type(error).__name__}: {error}"], advice)
        raise


def parameter_lines(optimizer: str, groups: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What has to be the same on all ranks: class, options, order, shapes, types, strides and values."""
    yield f"{OPTIMIZER}: {optimizer}"
    for place, group in enumerate(groups):
        options = (f"{name}={written(value)}" for name, value in sorted(group.items()) if name != "params")
        yield f"the options of group {place}: {', '.join(options)}"
        for position, parameter in enumerate(group["params"]):
            yield f"group {place} parameter {position}: {_described(parameter)}"
        yield f"the end of group {place}: {len(group['params'])} parameters"


def written(value: object) -> str:
    """An option as text that is the same in every process."""
    if isinstance(value, Tensor):
        return f"tensor({value.tolist()}, {value.dtype})"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(written, value))})"
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _described(parameter: Tensor) -> str:
    dtype = str(parameter.dtype).removeprefix("torch.")
    kind = "" if parameter.requires_grad else " frozen"
    what = f"{dtype}{list(parameter.shape)} strides {list(parameter.stride())} on {parameter.device.type}{kind}"
    return what if parameter.is_meta else f"{what}, with values of checksum {checksum(parameter):08x}"


def checksum(tensor: Tensor) -> int:
    """The CRC-32 of a tensor's bits, read through a piece of host memory."""
    flat = tensor.detach().reshape(-1)
    sum_ = 0
    for begin in range(0, flat.numel(), CHUNK):
        piece = flat[begin : begin + CHUNK].cpu().contiguous()
        sum_ = zlib.crc32(piece.view(torch.uint8).numpy().data, sum_)
    return sum_


def _difference(texts: Sequence[Sequence[str]], ranks: Sequence[int], advice: str) -> str:
    """The first thing that is not everywhere the same: what it is on which ranks."""
    lines = next(lines for lines in zip_longest(*texts) if len(set(lines)) > 1)
    name = next(line for line in lines if line is not None).partition(": ")[0]
    told = "; ".join(f"{_short(line, name)} on {_on(lines, line, ranks)}" for line in dict.fromkeys(lines))
    return f"the ranks disagree on {name}: {told}. {advice}"


def _short(line: str | None, name: str) -> str:
    return "nothing" if line is None else line.removeprefix(f"{name}: ")[:SHOWN]


def _on(lines: Sequence[str | None], line: str | None, ranks: Sequence[int]) -> str:
    found = [str(rank) for rank, theirs in zip(ranks, lines, strict=True) if theirs == line]
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}"
