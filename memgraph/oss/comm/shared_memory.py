"""Read the memory of other ranks on the same host, where the kernel allows that.

    messages         gradient -> kernel -> buffer of the other rank         parameter -> kernel -> parameter
    shared memory    gradient -> buffer of the rank that needs it           parameter -> parameter

`process_vm_readv` of Linux copies straight from one process into another: a step of two ranks on a CPU takes two thirds
of the CPU time that it takes with messages. It is allowed to processes of one user unless a container or
`kernel.yama.ptrace_scope` forbids it. So each rank first reads a random number from each other.

Readers don't announce when they have finished. All ranks meet before parameters are read, and when all have read.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from passes.shards import Bucket, ShardRange

from ..shards.shard_views import BucketViews
from .collectives import op_name
from .rank_group import RankGroup

LEAST = 1 << 20  # bytes of a bucket that backward averages this way; messages are faster than two meetings below that
CACHED = 1 << 19  # bytes that are read and added while they are in the cache
AT_ONCE = 512  # ranges in one call of the kernel, which takes 1024
BYTES = 1 << 28  # bytes in one call, which takes 2^31


class ReadError(RuntimeError):
    """The memory of another rank can't be read any more; the watchdog of the group finds out why."""


class Range(ctypes.Structure):
    """Bytes in the memory of a process."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class SharedMemoryComm:
    """Ranks of a group that are all on this host, as processes of the given numbers."""

    def __init__(self, ranks: RankGroup, processes: Sequence[int]) -> None:
        self.ranks, self.processes = ranks, list(processes)
        self.grad_addresses: list[list[int]] = []  # for each rank and parameter; 0 for no gradient
        self.parameter_addresses: list[list[int]] = []

    def share_addresses(self, grads: dict[int, Tensor], parameters: Sequence[Tensor]) -> None:
        """Exchange the addresses of gradients and parameters, which stay valid until all ranks have met."""
        addresses = [grads[i].data_ptr() if i in grads else 0 for i in range(len(parameters))]
        addresses += [parameter.data_ptr() for parameter in parameters]
        table = self.ranks.all_gather(torch.tensor(addresses, dtype=torch.int64)).tolist()
        self.grad_addresses = [row[: len(parameters)] for row in table]
        self.parameter_addresses = [row[len(parameters) :] for row in table]

    def average(self, bucket: BucketViews, grads: Sequence[Tensor]) -> list[Tensor]:
        """Average the gradients of this rank's stretches, added in rank order."""
        stretches = bucket.stretches[self.ranks.rank]
        if not stretches:
            return []
        own = grads[0] if len(grads) == 1 else torch.cat(list(grads))
        total = torch.empty_like(own)
        if len(stretches) == 1:  # a range at a time, so that it is read and added in the cache
            step = CACHED // own.element_size()
            whole = stretches[0]
            for begin in range(0, whole.count, step):
                end = min(whole.count, begin + step)
                part = replace(whole, begin=whole.begin + begin, end=whole.begin + end)
                self._average([part], own[begin:end], total[begin:end])
        else:
            self._average(stretches, own, total)
        return list(total.split([one.count for one in stretches]))

    def reduce_packed(self, bucket: Bucket, packed: Tensor) -> Callable[[], Tensor]:
        """Start to average a bucket that is packed into equal parts; the function returns this rank's part."""
        watchdog, ranks, rank = self.ranks.watchdog, self.ranks.ranks, self.ranks.rank
        name = f"averaging of the gradients of {op_name(bucket.params or [0])} in backward"
        exchanged = self.ranks.start_all_gather(torch.tensor([packed.data_ptr()]), name)

        def wait() -> Tensor:
            addresses = exchanged().flatten().tolist()
            with watchdog.naming(name):
                own = packed[rank * bucket.shard_size : (rank + 1) * bucket.shard_size]
                offset = own.data_ptr() - packed.data_ptr()
                total: Tensor | None = None
                for other in range(ranks):
                    part = own
                    if other != rank:
                        part = torch.empty_like(own)
                        read(self.processes[other], [(part, addresses[other] + offset)])
                    total = part if total is None else torch.add(total, part, out=part if total is own else total)
            assert total is not None
            self.meet(name)
            return total.div_(ranks)

        return wait

    def gather(self, buckets: Sequence[BucketViews], failed: bool) -> bool:
        """Read other ranks' elements when all have updated theirs, and wait until all have read."""
        name = f"gathering of {_items(buckets)}"
        if self.meet(name, failed):
            return True
        self.read_parameters(buckets)
        return self.meet(name)

    def read_parameters(self, buckets: Sequence[BucketViews]) -> None:
        """Read other ranks' elements, which stay as they are until all ranks have met."""
        for rank in range(self.ranks.ranks):
            if rank != self.ranks.rank:
                pairs = [pair for one in buckets for pair in zip(one.stretches[rank], one.views[rank], strict=True)]
                addresses = self.parameter_addresses[rank]
                wanted = [(view, _address(addresses, one, view)) for one, view in pairs if one.count]
                with self.ranks.watchdog.naming(f"gathering of {_items(buckets)}"):
                    read(self.processes[rank], wanted)
                torch.autograd.graph.increment_version([view for _, view in pairs])

    def meet(self, name: str, flag: bool = False) -> bool:
        """Wait for all ranks; return True if any of them has the flag."""
        return bool(self.ranks.maximum(torch.tensor([flag], dtype=torch.int32), name))

    def _average(self, stretches: Sequence[ShardRange], own: Tensor, total: Tensor) -> None:
        added: Tensor | None = None
        for rank in range(self.ranks.ranks):
            part = own
            if rank != self.ranks.rank:
                part = torch.empty_like(own) if added is total else total
                self._read_grads(rank, stretches, part)
            added = part if added is None else torch.add(added, part, out=total)
        total.div_(self.ranks.ranks)

    def _read_grads(self, rank: int, stretches: Sequence[ShardRange], buffer: Tensor) -> None:
        wanted, addresses = [], self.grad_addresses[rank]
        for one, part in zip(stretches, buffer.split([one.count for one in stretches]), strict=True):
            if not addresses[one.param]:
                part.zero_()
            elif one.count:
                wanted.append((part, _address(addresses, one, part)))
        with self.ranks.watchdog.naming(f"averaging of the gradients of {op_name([one.param for one in stretches])}"):
            read(self.processes[rank], wanted)


def _address(begins: Sequence[int], stretch: ShardRange, like: Tensor) -> int:
    return begins[stretch.param] + stretch.begin * like.element_size()


def _items(buckets: Iterable[BucketViews]) -> str:
    return op_name([item for one in buckets for item in one.bucket.params] or [0])


def shared_memory_comm(ranks: RankGroup) -> SharedMemoryComm | None:
    """Return a comm if each rank can read the memory of each other; a collective."""
    if ranks.is_alone:
        return None
    generator = torch.Generator()  # the training's own random numbers stay as they are
    generator.seed()
    token = torch.randint(1 << 62, (2,), dtype=torch.int64, generator=generator)
    table = ranks.all_gather(torch.tensor([os.getpid(), token.data_ptr(), *token.tolist()], dtype=torch.int64)).tolist()
    fails = int(not all(_reads(process, address, wanted) for process, address, *wanted in table))
    failed = bool(ranks.maximum(torch.tensor([fails], dtype=torch.int32)))
    return None if failed else SharedMemoryComm(ranks, [process for process, *_ in table])


def read(process: int, wanted: Iterable[tuple[Tensor, int]]) -> None:
    """Fill contiguous tensors with the bytes at these addresses of a process."""
    for batch in _batches(wanted):
        local = (Range * len(batch))(*[Range(tensor.data_ptr(), tensor.nbytes) for tensor, _ in batch])
        remote = (Range * len(batch))(*[Range(address, tensor.nbytes) for tensor, address in batch])
        nbytes = sum(tensor.nbytes for tensor, _ in batch)
        got = _process_vm_readv()(process, local, len(batch), remote, len(batch), 0)
        if got != nbytes:
            why = os.strerror(ctypes.get_errno()) if got < 0 else f"{got} of {nbytes} bytes"
            raise ReadError(f"the memory of process {process}, another rank, can't be read any more: {why}")


def _batches(wanted: Iterable[tuple[Tensor, int]]) -> Iterator[list[tuple[Tensor, int]]]:
    batch: list[tuple[Tensor, int]] = []
    nbytes = 0
    for tensor, address in wanted:
        if batch and (len(batch) == AT_ONCE or nbytes + tensor.nbytes > BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append((tensor, address))
        nbytes += tensor.nbytes
    if batch:
        yield batch


def _reads(process: int, address: int, wanted: Sequence[int]) -> bool:
    token = torch.zeros(len(wanted), dtype=torch.int64)
    try:
        read(process, [(token, address)])
    except (ReadError, AttributeError):  # this C library has no such call
        return False
    return token.tolist() == list(wanted)


def _process_vm_readv() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    call.restype = ctypes.c_ssize_t
    return call
