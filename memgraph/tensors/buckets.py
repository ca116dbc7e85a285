"""Pad batches to a few lengths, so that few kinds of steps are planned.

    collate = memgraph.pad_to_buckets(default_collate, buckets=64, values={"input_ids": 0, "labels": -100})
    DataLoader(data, collate_fn=collate)

input_ids of 8 x 117   ->   input_ids of 8 x 128, whose last 11 columns are 0

Padding changes what the model sees, and only the caller knows with what to pad: a mask with 0, labels with the index
that the loss ignores. So each tensor that is padded is named with its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Padding = int | float | bool


def pad_to_buckets(
    collate: Callable[[Any], Any], buckets: int | Sequence[int], values: Mapping[str | int, Padding], dim: int = -1
) -> Callable[[Any], Any]:
    """Return a function for `DataLoader(collate_fn=)` that pads what `collate` returns at the end of a dimension.

    Args:
        collate: returns a batch: a mapping, a tuple or a list of tensors.
        buckets: a number, for lengths that are multiples of it, or all lengths; each batch gets the least that is
            enough.
        values: for each tensor to pad, by its key or position in the batch, what to pad it with.
        dim: the dimension that is padded.

    Raises:
        ValueError: no bucket, or one below 1; at a batch: it is longer than the longest bucket, or has a tensor of
            another length.
        KeyError: at a batch: it lacks a named tensor.
        TypeError: `buckets` is neither an int nor a list of ints; at a batch: a named part is no tensor, or the batch
            has another type.
    """
    given = buckets if isinstance(buckets, Sequence) else (buckets,)
    if any(type(length) is not int for length in given):
        raise TypeError(f"buckets= is {buckets!r}; give an int, for multiples of it, or a list of ints")
    lengths = tuple(sorted(given))
    if not lengths or min(lengths) < 1:
        raise ValueError(f"buckets= is {buckets!r}; give lengths of at least 1, or one number for multiples of it")
    if not values:
        raise ValueError("values= names no tensor to pad: give its key in the batch and the value, as {'input_ids': 0}")
    return _PaddedCollate(collate, lengths, isinstance(buckets, int), dict(values), dim)


class _PaddedCollate:
    """The function; a class, since workers of a DataLoader may have to pickle it."""

    def __init__(
        self, collate: Callable[[Any], Any], lengths: tuple[int, ...], is_multiple: bool,
        values: dict[str | int, Padding], dim: int,
    ) -> None:  # fmt: skip
        self.collate, self.lengths, self.is_multiple = collate, lengths, is_multiple
        self.values, self.dim = values, dim

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        named = {key: _tensor(batch, key) for key in self.values}
        sizes = {key: tensor.shape[self.dim] for key, tensor in named.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the tensors to pad have different lengths in dimension {self.dim}: {sizes}")
        size = next(iter(sizes.values()))
        missing = self._bucket(size) - size
        padded = {key: self._padded(tensor, self.values[key], missing) for key, tensor in named.items()}
        return _replaced(batch, padded) if missing else batch

    def _bucket(self, size: int) -> int:
        if self.is_multiple:
            return max(1, -(-size // self.lengths[0])) * self.lengths[0]
        for length in self.lengths:
            if length >= size:
                return length
        raise ValueError(
            f"a batch has length {size}, and the longest bucket is {self.lengths[-1]}: add one, or truncate the samples"
        )

    def _padded(self, tensor: Tensor, value: Padding, missing: int) -> Tensor:
        shape = list(tensor.shape)
        shape[self.dim] = missing
        return torch.cat([tensor, tensor.new_full(shape, value)], self.dim)


def _tensor(batch: Any, key: Any) -> Tensor:
    if not (isinstance(batch, Mapping) or isinstance(batch, Sequence)):  # noqa: SIM101
        raise TypeError(f"a batch to pad has to be a mapping, a tuple or a list, not a {type(batch).__name__}")
    try:
        tensor = batch[key]
    except (LookupError, TypeError) as error:
        has = list(batch) if isinstance(batch, Mapping) else f"positions 0 to {len(batch) - 1}"
        raise KeyError(f"the batch has no {key!r} to pad: it has {has}") from error
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{key!r} of the batch is a {type(tensor).__name__}, and only tensors are padded")
    return tensor


def _replaced(batch: Any, padded: Mapping[str | int, Tensor]) -> Any:
    """Return a batch of the same type with other tensors."""
    if isinstance(batch, Mapping):
        return type(batch)({**batch, **padded})  # type: ignore[call-arg]
    parts = [padded.get(place, padded.get(place - len(batch), part)) for place, part in enumerate(batch)]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
