"""Ranks that were given different things are told so at construction, all of them in the same words."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

import memgraph
from memgraph import AgreementError
from memgraph.oss.comm.agreement import checksum
from tests.memgraph.oss.checkpoint.test_full_state import refusal
from tests.support.ranks import on_ranks

NAMES = ("order", "shape", "type", "strides", "frozen", "values", "count", "groups", "option", "optimizer")


def _parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))]


def _given(name: str, differs: bool) -> tuple[list[dict[str, Any]], type[optim.Optimizer]]:
    w, b = _parameters()
    kind: type[optim.Optimizer] = optim.Adam
    groups: list[dict[str, Any]] = [{"params": [w], "lr": 0.1}, {"params": [b]}]
    if differs and name == "order":
        groups = [{"params": [b], "lr": 0.1}, {"params": [w]}]
    elif differs and name == "shape":
        groups[1]["params"] = [nn.Parameter(torch.zeros(5))]
    elif differs and name == "type":
        w.data = w.data.double()
    elif differs and name == "strides":
        w.data = w.data.t().contiguous().t()
    elif differs and name == "frozen":
        b.requires_grad_(False)
    elif differs and name == "values":
        b.data[1] += 1e-6
    elif differs and name == "count":
        groups[1]["params"].append(nn.Parameter(torch.zeros(2)))
    elif differs and name == "groups":
        groups.append({"params": [nn.Parameter(torch.zeros(2))]})
    elif differs and name == "option":
        groups[1]["lr"] = 0.3
    elif differs and name == "optimizer":
        kind = optim.AdamW
    return groups, kind


def _told(rank: int) -> list[str]:
    messages = [refusal(AgreementError, memgraph.OSS, *_given(name, rank == 1)) for name in NAMES]
    optimizer = memgraph.OSS(*_given("", False))
    added = {"params": [nn.Parameter(torch.full((3,), float(rank)))]}
    messages.append(refusal(AgreementError, optimizer.add_param_group, added))
    assert len(optimizer.param_groups) == 2
    optimizer.step()  # goes on as before
    return messages


def test_a_difference_is_an_error_on_all_ranks() -> None:
    first, *others = on_ranks(3, _told)
    assert others == [first, first]
    texts = dict(zip(NAMES, first, strict=False))
    start = {name: text.removeprefix("the ranks disagree on ").split(". Build")[0] for name, text in texts.items()}
    w, b = ("float32[3, 4] strides [4, 1] on cpu", "float32[4] strides [1] on cpu")
    sums = {name: f"{checksum(p):08x}" for name, p in zip("wb", _parameters(), strict=True)}
    assert (
        start["order"]
        == f"group 0 parameter 0: {w}, with values of checksum {sums['w']} on ranks 0, 2; {b}, with values of checksum {sums['b']} on rank 1"
    )
    assert start["shape"].startswith(
        f"group 1 parameter 0: {b}, with values of checksum {sums['b']} on ranks 0, 2; float32[5] strides [1] on cpu"
    )
    assert "float64[3, 4] strides [4, 1] on cpu, with" in start["type"]
    assert "float32[3, 4] strides [1, 3] on cpu, with" in start["strides"]
    assert f"{b} frozen, with values of checksum {sums['b']} on rank 1" in start["frozen"]
    assert start["values"].startswith(
        f"group 1 parameter 0: {b}, with values of checksum {sums['b']} on ranks 0, 2; {b}, with values of checksum "
    )
    assert start["count"].startswith("the end of group 1: 1 parameters on ranks 0, 2; group 1 parameter 1: float32[2]")
    assert start["groups"].startswith("the options of group 2: nothing on ranks 0, 2; ")
    assert "lr=0.001" in start["option"] and "lr=0.3" in start["option"]
    assert start["optimizer"].startswith("the optimizer: Adam on ranks 0, 2; AdamW on rank 1")
    assert texts["values"].endswith("for p in model.parameters(): torch.distributed.broadcast(p.data, 0)")
    assert "on rank 0; float32[3] strides [1] on cpu, with values of checksum" in first[-1]


def test_a_checksum_sees_values_and_where_they_are() -> None:
    values = [torch.zeros(4), torch.ones(4), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), torch.zeros(0)]
    values += [each.to(torch.bfloat16) for each in values[1:4]] + [torch.tensor(3), torch.tensor([True, False])]
    assert len({checksum(each) for each in values}) == len(values)
    assert checksum(torch.arange(12.0).view(3, 4).t()) == checksum(torch.arange(12.0).view(3, 4).t().contiguous())
