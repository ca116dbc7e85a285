"""The model that is trained whole: its rows, the plain rule beside it, and the optimizer of both."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import gpu, whole
from benchmarks.contenders import Row
from benchmarks.hosted import Hosted
from benchmarks.laps import Laps
from benchmarks.whole import SEVEN, Whole, flops, made, rows
from benchmarks.wide import WideAdamW

CPU = torch.device("cpu")
TOY = SEVEN.toy()


def test_it_has_seven_billion_parameters_and_a_forward_of_two_operations_for_each_and_token() -> None:
    with torch.device("meta"):
        model = Whole(SEVEN)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert 6.7e9 < count < 6.8e9
    assert 6.0 < flops(SEVEN) / SEVEN.tokens / (count - SEVEN.vocabulary * SEVEN.shape.width) < 6.6


def test_its_states_are_wide_and_it_learns_as_torchs_own() -> None:
    torch.manual_seed(0)
    ours = nn.Linear(32, 32)
    theirs = copy.deepcopy(ours)
    pairs = [(ours, WideAdamW(ours.parameters())), (theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-4))]
    for _ in range(4):
        for module, optimizer in pairs:
            module(torch.ones(4, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    thin = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = WideAdamW(thin.parameters())
    thin(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len(states) == 4 and all(state.dtype == torch.float32 for state in states)


def test_the_plain_rule_trains_as_the_plain_model_does() -> None:
    model, batch = made(replace(TOY, shape=replace(TOY.shape, width=32)), CPU)
    plain = copy.deepcopy(model)
    hosted = Hosted(model, [model.token, *model.blocks, nn.ModuleList([model.norm, model.head])], CPU)
    optimizer = WideAdamW(plain.parameters())
    for _ in range(3):
        found = hosted.step(*batch)
        expected = plain(*batch)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(found, expected.detach())
    weights = torch.cat([part.weights for part in hosted.parts])
    assert torch.equal(weights, torch.cat([parameter.detach().flatten() for parameter in plain.parameters()]))
    assert not any(parameter.numel() for parameter in model.parameters())
    hosted.close()


def test_what_fails_is_a_row_and_the_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Row:
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(whole, "_ours", fails)
    found = list(rows(TOY, Laps(CPU), 2, lambda: 600.0))
    assert [(row.name, row.why) for row in found] == [
        ("memgraph", "RuntimeError: CUDA out of memory"), ("host-offload rule", ""),
    ]  # fmt: skip
    assert found[1].tokens > 0 and found[1].share > 0 and not found[0].tokens


def test_what_goes_wrong_between_rows_ends_them_with_one() -> None:
    def some() -> object:
        yield Row("7b", "memgraph")
        raise ValueError("no matrix product")

    found = list(gpu._guarded("7b", some()))  # type: ignore[arg-type]
    assert [row.why for row in found] == ["", "ValueError: no matrix product"]
