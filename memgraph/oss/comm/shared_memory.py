"""Ranks of one machine read each other's memory, where the kernel lets them.

    messages    gradient -> kernel -> buffer of the other rank         parameter -> kernel -> parameter of the other
    near        gradient -> buffer of the rank that wants it           parameter -> parameter

Linux copies straight from one process into another (`process_vm_readv`), which takes a fifth of the time of a message
through a socket. It lets processes of one user do so unless a container or `kernel.yama.ptrace_scope` forbids it: at
construction each rank reads a random number from each other, and if any of them can't, messages are sent as everywhere.

Nobody says when he has read: all ranks meet before parameters are read, and again when all have read all they want.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from passes.shards import Bucket, Piece

from ..shards.shard_views import BucketViews
from .exchange import BucketComm, op_name

LEAST = 1 << 20  # bytes of a bucket that backward averages so: less is sent in the time of the two meetings
CACHED = 1 << 19  # bytes that are read and added while they are in the cache
AT_ONCE = 512  # ranges in one call of the kernel, which takes 1024
BYTES = 1 << 28  # and bytes; it takes 2^31


class ReadError(RuntimeError):
    """The memory of another rank can't be read any more; the watch of the group finds out why."""


class Range(ctypes.Structure):
    """Bytes in the memory of a process."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class SharedMemoryComm:
    """The ranks of a group that are all on this machine."""

    def __init__(self, exchange: BucketComm, processes: Sequence[int]) -> None:
        self.exchange, self.processes = exchange, list(processes)
        self.gradients: list[list[int]] = []  # of each rank, where its gradients begin; 0 where there is none
        self.parameters: list[list[int]] = []

    def open(self, gradients: dict[int, Tensor], parameters: Sequence[Tensor]) -> None:
        """Tell where gradients and parameters are; they have to stay there until all ranks have met."""
        addresses = [gradients[i].data_ptr() if i in gradients else 0 for i in range(len(parameters))]
        addresses += [parameter.data_ptr() for parameter in parameters]
        table = self.exchange.each(torch.tensor(addresses, dtype=torch.int64)).tolist()
        self.gradients = [row[: len(parameters)] for row in table]
        self.parameters = [row[len(parameters) :] for row in table]

    def average(self, laid: BucketViews, own: Sequence[Tensor]) -> list[Tensor]:
        """The mean over ranks of the gradients of this rank's stretches, added in the order of ranks."""
        pieces = laid.stretches[self.exchange.rank]
        if not pieces:
            return []
        mine = own[0] if len(own) == 1 else torch.cat(list(own))
        total = torch.empty_like(mine)
        if len(pieces) == 1:
            self._add_in_parts(pieces[0], mine, total)
        else:
            self._add(pieces, mine, total)
        return list(total.split([piece.count for piece in pieces]))

    def packed(self, bucket: Bucket, whole: Tensor) -> Callable[[], Tensor]:
        """Begin to average what all ranks have of a bucket, which lies in equal parts, and stays until that is done.

        Returns:
            waits, and gives this rank's part
        """
        watch, ranks = self.exchange.watch, self.exchange.ranks
        name = f"averaging of the gradients of {op_name(bucket.items or [0])} in backward"
        told = self.exchange.told(torch.tensor([whole.data_ptr()]), name)

        def wait() -> Tensor:
            begins = told().flatten().tolist()
            with watch.naming(name):
                mine = whole[self.exchange.rank * bucket.part : (self.exchange.rank + 1) * bucket.part]
                at = mine.data_ptr() - whole.data_ptr()
                total: Tensor | None = None
                for rank in range(ranks):
                    part = mine
                    if rank != self.exchange.rank:
                        part = torch.empty_like(mine)
                        read(self.processes[rank], [(part, begins[rank] + at)])
                    total = part if total is None else torch.add(total, part, out=part if total is mine else total)
            assert total is not None
            self.meet(name)
            return total.div_(ranks)

        return wait

    def gather(self, used: Sequence[BucketViews], failed: bool) -> bool:
        """Read what the others own, once all have updated what they own; wait until all have read.

        Returns:
            whether that has failed on any rank; then nothing is read
        """
        name = f"gathering of {_items(used)}"
        if self.meet(name, failed):
            return True
        self.fetch(used)
        return self.meet(name)

    def fetch(self, used: Sequence[BucketViews]) -> None:
        """Read what the others own, and have updated by now; it has to stay until all have met."""
        for rank in range(self.exchange.ranks):
            if rank != self.exchange.rank:
                every = [one for laid in used for one in zip(laid.stretches[rank], laid.views[rank], strict=True)]
                with self.exchange.watch.naming(f"gathering of {_items(used)}"):
                    read(
                        self.processes[rank], [(v, self._at(self.parameters[rank], p, v)) for p, v in every if p.count]
                    )
                torch.autograd.graph.increment_version([view for _, view in every])

    def meet(self, name: str, flag: bool = False) -> bool:
        """Wait until all ranks are here; whether any of them has the flag."""
        return bool(self.exchange.most(torch.tensor([flag], dtype=torch.int32), name))

    def _add_in_parts(self, whole: Piece, mine: Tensor, total: Tensor) -> None:
        """The mean of what the ranks have of a piece, into `total`, as much at once as stays in the cache."""
        step = CACHED // mine.element_size()
        for begin in range(0, whole.count, step):
            end = min(whole.count, begin + step)
            part = replace(whole, begin=whole.begin + begin, end=whole.begin + end)
            self._add([part], mine[begin:end], total[begin:end])

    def _add(self, pieces: Sequence[Piece], mine: Tensor, total: Tensor) -> None:
        """The mean of what the ranks have of these pieces, into `total`."""
        added: Tensor | None = None
        for rank in range(self.exchange.ranks):
            part = mine
            if rank != self.exchange.rank:
                part = torch.empty_like(mine) if added is total else total
                self._read_gradients(rank, pieces, part)
            added = part if added is None else torch.add(added, part, out=total)
        total.div_(self.exchange.ranks)

    def _read_gradients(self, rank: int, pieces: Sequence[Piece], room: Tensor) -> None:
        wanted = []
        for piece, part in zip(pieces, room.split([piece.count for piece in pieces]), strict=True):
            if not self.gradients[rank][piece.item]:
                part.zero_()
            elif piece.count:
                wanted.append((part, self._at(self.gradients[rank], piece, part)))
        with self.exchange.watch.naming(f"averaging of the gradients of {op_name([piece.item for piece in pieces])}"):
            read(self.processes[rank], wanted)

    def _at(self, begins: Sequence[int], piece: Piece, like: Tensor) -> int:
        return begins[piece.item] + piece.begin * like.element_size()


def _items(used: Iterable[BucketViews]) -> str:
    return op_name([item for laid in used for item in laid.bucket.items] or [0])


def shared_memory_comm(exchange: BucketComm) -> SharedMemoryComm | None:
    """The ranks, if each can read the memory of each other; all ranks of the group have to ask."""
    if exchange.is_alone:
        return None
    token = torch.randint(1 << 62, (2,), dtype=torch.int64, generator=_chance())
    mine = torch.tensor([os.getpid(), token.data_ptr(), *token.tolist()], dtype=torch.int64)
    told = exchange.each(mine).tolist()
    fails = int(not all(_reads(process, address, wanted) for process, address, *wanted in told))
    failed = bool(exchange.most(torch.tensor([fails], dtype=torch.int32)))
    return None if failed else SharedMemoryComm(exchange, [process for process, *_ in told])


def read(process: int, wanted: Iterable[tuple[Tensor, int]]) -> None:
    """Fill contiguous tensors with what lies at these addresses of a process.

    Raises:
        ReadError: it is gone, or has nothing there.
    """
    for some in _portions(wanted):
        here = (Range * len(some))(*[Range(tensor.data_ptr(), tensor.nbytes) for tensor, _ in some])
        there = (Range * len(some))(*[Range(address, tensor.nbytes) for tensor, address in some])
        nbytes = sum(tensor.nbytes for tensor, _ in some)
        got = _call()(process, here, len(some), there, len(some), 0)
        if got != nbytes:
            why = os.strerror(ctypes.get_errno()) if got < 0 else f"{got} of {nbytes} bytes"
            raise ReadError(f"the memory of process {process}, another rank, can't be read any more: {why}")


def _portions(wanted: Iterable[tuple[Tensor, int]]) -> Iterator[list[tuple[Tensor, int]]]:
    some: list[tuple[Tensor, int]] = []
    nbytes = 0
    for tensor, address in wanted:
        if some and (len(some) == AT_ONCE or nbytes + tensor.nbytes > BYTES):
            yield some
            some, nbytes = [], 0
        some.append((tensor, address))
        nbytes += tensor.nbytes
    if some:
        yield some


def _reads(process: int, address: int, wanted: Sequence[int]) -> bool:
    found = torch.zeros(len(wanted), dtype=torch.int64)
    try:
        read(process, [(found, address)])
    except (ReadError, AttributeError):  # this C library has no such call
        return False
    return found.tolist() == list(wanted)


def _call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    call.restype = ctypes.c_ssize_t
    return call


def _chance() -> torch.Generator:
    """Numbers that nobody's training depends on."""
    generator = torch.Generator()
    generator.seed()
    return generator
