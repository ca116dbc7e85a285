"""Small collectives over a process group: numbers, texts and failures.

rank 0: b"two"     rank 1: b"three"            ->   [b"two", b"three"] on both
rank 0: None       rank 1: KeyError('batch')   ->   {1: "KeyError: 'batch'"} on both
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .watchdog import CollectiveWatchdog

NUMBERS = 7  # tag of messages with numbers, which don't wait behind buckets
SHOWN = 300  # characters of another rank's error


class RankGroup:
    """The ranks of a process group."""

    def __init__(self, watchdog: CollectiveWatchdog) -> None:
        self.watchdog, self.group = watchdog, watchdog.group
        self.rank, self.ranks = dist.get_rank(watchdog.group), dist.get_world_size(watchdog.group)

    @property
    def is_alone(self) -> bool:
        return self.ranks == 1

    def maximum(self, numbers: Tensor, name: str = "exchange of gradient flags") -> Tensor:
        """Replace each number by its maximum over all ranks."""
        if self.is_alone:
            return numbers
        if numbers.device.type == "cpu":
            return torch.amax(self.start_all_gather(numbers, name)(), 0, out=numbers)
        with self.watchdog.naming(name):
            self.watchdog.wait(dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group, async_op=True))
        return numbers

    def all_gather(self, numbers: Tensor) -> Tensor:
        return numbers[None] if self.is_alone else self.start_all_gather(numbers, "exchange of numbers")()

    def start_all_gather(self, numbers: Tensor, name: str) -> Callable[[], Tensor]:
        """Start to send numbers to all ranks; the function waits and returns one row for each rank.

        On the CPU they go as messages: gloo's collectives run in a thread that frees their tensors some time after the
        wait for them has ended, which a memory meter would count.
        """
        rows = numbers.new_empty(self.ranks, *numbers.shape)
        with self.watchdog.naming(name):
            if numbers.device.type == "cpu":
                rows[self.rank] = numbers
                others = [rank for rank in range(self.ranks) if rank != self.rank]
                works = [dist.irecv(rows[rank], group=self.group, group_src=rank, tag=NUMBERS) for rank in others]
                works += [dist.isend(rows[self.rank], group=self.group, group_dst=rank, tag=NUMBERS) for rank in others]
            else:
                works = [dist.all_gather(list(rows), numbers, group=self.group, async_op=True)]

        def wait() -> Tensor:
            with self.watchdog.naming(name):
                for work in works:
                    self.watchdog.wait(work)
            return rows

        return wait

    def mean(self, number: Tensor) -> Tensor:
        """Return the mean of a number over ranks, exact if it is equal on all of them."""
        rows = self.all_gather(self.tensor([float(number)], torch.float64, number.device))
        return rows.mean().to(number.device, number.dtype)

    def tensor(self, values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a small tensor on a device that the backend can send from: gloo takes the CPU, NCCL the GPU."""
        on_device = device.type != "cpu" and dist.get_backend(self.group) == "nccl"
        return torch.tensor(values, dtype=dtype, device=device if on_device else "cpu")


def all_texts(watchdog: CollectiveWatchdog, own: bytes, name: str) -> list[bytes]:
    """Return the bytes of every rank, of any lengths; errors call the collective `name`."""
    counts = [int.from_bytes(each, "little") for each in equal_texts(watchdog, len(own).to_bytes(8, "little"), name)]
    padded = equal_texts(watchdog, own.ljust(max(counts), b"\0"), name)
    return [each[:count] for each, count in zip(padded, counts, strict=True)]


def equal_texts(watchdog: CollectiveWatchdog, own: bytes, name: str) -> Sequence[bytes]:
    """Return the bytes of every rank, equally many on each."""
    if len(watchdog.members) == 1 or not own:
        return [own] * len(watchdog.members)
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(watchdog.device)
    received = [torch.empty_like(sent) for _ in watchdog.members]
    with watchdog.naming(name):
        watchdog.wait(dist.all_gather(received, sent, group=watchdog.group, async_op=True))
    return [bytes(each.cpu().numpy()) for each in received]


def all_failures(watchdog: CollectiveWatchdog, error: BaseException | str | None, name: str) -> dict[int, str]:
    """Return the errors of all ranks that have one, by their global ranks; a collective."""
    text = error if isinstance(error, str) else "" if error is None else f"{type(error).__name__}: {error}"
    texts = [each.decode() for each in all_texts(watchdog, text.encode(), name)]
    return {rank: each for rank, each in zip(watchdog.members, texts, strict=True) if each}


def format_failures(failures: Mapping[int, str]) -> str:
    return "; ".join(f"{' '.join(each.split())[:SHOWN]} on rank {rank}" for rank, each in failures.items())
