"""Batches are padded to a few lengths with values that the caller names."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import memgraph


def batch_of(length: int) -> dict[str, Any]:
    return {"ids": torch.arange(2 * length).view(2, length), "labels": torch.ones(2, length), "names": ["a", "b"]}


class TensorRows(Dataset[tuple[torch.Tensor]]):
    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[torch.Tensor]:
        return (self.rows[place],)


def given(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize(("length", "expected"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 24)])
def test_lengths_become_multiples(length: int, expected: int) -> None:
    padded = memgraph.pad_to_buckets(given, 8, {"ids": 7, "labels": -100})(batch_of(length))
    assert padded["ids"].shape == padded["labels"].shape == (2, expected)
    assert torch.equal(padded["ids"][:, :length], batch_of(length)["ids"]) and (padded["ids"][:, length:] == 7).all()
    assert (padded["labels"][:, length:] == -100).all() and padded["names"] == ["a", "b"]
    assert padded["ids"].dtype == torch.long and padded["labels"].dtype == torch.float32


def test_lengths_become_the_least_bucket_that_is_enough() -> None:
    pad = memgraph.pad_to_buckets(given, (30, 10, 20), {"ids": 0})
    assert [pad(batch_of(n))["ids"].shape[1] for n in (3, 10, 11, 20, 25, 30)] == [10, 10, 20, 20, 30, 30]
    with pytest.raises(ValueError, match="length 31, and the longest bucket is 30"):
        pad(batch_of(31))


def test_containers_keep_their_type() -> None:
    Pair = namedtuple("Pair", "first second")
    x, y = torch.ones(2, 5), torch.ones(2)
    assert memgraph.pad_to_buckets(given, 4, {0: 0})((x, y))[0].shape == (2, 8)
    assert isinstance(memgraph.pad_to_buckets(given, 4, {0: 0})([x, y]), list)
    padded = memgraph.pad_to_buckets(given, 4, {-2: 0})(Pair(x, y))
    assert isinstance(padded, Pair) and padded.first.shape == (2, 8) and padded.second is y
    for kind in (OrderedDict, UserDict):
        assert isinstance(memgraph.pad_to_buckets(given, 4, {"x": 0})(kind(x=x)), kind)


def test_wrong_batches_and_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match="of at least 1"):
        memgraph.pad_to_buckets(given, (), {"ids": 0})
    with pytest.raises(ValueError, match="of at least 1"):
        memgraph.pad_to_buckets(given, 0, {"ids": 0})
    for buckets in (64.0, True, "64", (32, 64.0)):
        with pytest.raises(TypeError, match="give an int, for multiples of it, or a list of ints"):
            memgraph.pad_to_buckets(given, buckets, {"ids": 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names no tensor"):
        memgraph.pad_to_buckets(given, 8, {})
    with pytest.raises(KeyError, match="no 'mask' to pad"):
        memgraph.pad_to_buckets(given, 8, {"mask": 0})(batch_of(3))
    with pytest.raises(KeyError, match="no 5 to pad"):
        memgraph.pad_to_buckets(given, 8, {5: 0})((torch.ones(2),))
    with pytest.raises(TypeError, match="'names' of the batch is a list"):
        memgraph.pad_to_buckets(given, 8, {"names": 0})(batch_of(3))
    with pytest.raises(TypeError, match="not a int"):
        memgraph.pad_to_buckets(given, 8, {0: 0})(3)
    with pytest.raises(ValueError, match="different lengths"):
        memgraph.pad_to_buckets(given, 8, {0: 0, 1: 0})((torch.ones(2, 3), torch.ones(2, 4)))


def test_workers_can_pickle_it() -> None:
    pad = pickle.loads(pickle.dumps(memgraph.pad_to_buckets(default_collate, 8, {0: 0})))
    assert pad([(torch.ones(3), 1)])[0].shape == (1, 8)


def test_a_masked_loss_is_planned_once_for_each_bucket() -> None:
    torch.manual_seed(0)
    data = [torch.randint(0, 9, (n,)) for n in (5, 5, 7, 7, 6, 6, 9, 9, 12, 12)]
    pad = memgraph.pad_to_buckets(default_collate, 8, {0: 0})
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    compiled = memgraph.compile(model)
    for (batch,) in DataLoader(TensorRows(data), batch_size=2, collate_fn=pad):
        F.cross_entropy(compiled(batch).flatten(0, 1), batch.flatten(), ignore_index=0).backward()
        model.zero_grad()
    assert len(compiled.plans) == 2
