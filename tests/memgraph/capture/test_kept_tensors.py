"""Forward and its hooks may put nothing into arguments or closures: a captured step would lose it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import memgraph
from memgraph import CaptureError

X = torch.ones(8, 16)


class Collecting(nn.Module):
    """Puts its penalty into an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor, terms: Any) -> Tensor:
        y: Tensor = self.layer(x)
        if isinstance(terms, list):
            terms.append(y.square().mean())
        elif isinstance(terms, dict):
            terms["penalty"] = y.square().mean()
        else:
            terms.penalty = y.square().mean()
        return y


class Terms:
    """Holds what a forward gives it."""


@pytest.mark.parametrize("make", [list, dict, Terms])
def test_what_forward_puts_into_an_argument_is_refused(make: Callable[[], Any]) -> None:
    terms = make()
    with pytest.raises(CaptureError, match=r"changes its argument `terms`.* a (list|dict|Terms) "):
        memgraph.compile(Collecting(), "1GB")(X, terms)
    assert not terms if isinstance(terms, list | dict) else not vars(terms)


def test_a_cache_that_forward_fills_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)).eval()
    ids = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad(), pytest.raises(CaptureError, match=r"argument `past_key_values`.*DynamicCache"):
        memgraph.compile(model, "1GB")(input_ids=ids, past_key_values=DynamicCache())


class Popping(nn.Module):
    """Takes its labels out of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        loss: Tensor = nn.functional.cross_entropy(self.layer(batch["x"]), labels)
        return loss


def test_what_forward_takes_out_of_an_argument_is_not() -> None:
    model = Popping()
    batch = {"x": X, "labels": torch.zeros(8, dtype=torch.long)}
    assert torch.equal(memgraph.compile(model, "1GB")(dict(batch)), model(dict(batch)))


def _keeps(kind: str, kept: dict[str, Any]) -> Callable[..., None]:
    """Return a hook that keeps what it is given: in a closure, a default, a partial's argument, an object, or deeper."""
    if kind == "closure":
        return lambda module, args, out: kept.update(h=out)
    if kind == "default":

        def default(module: nn.Module, args: Any, out: Tensor, into: dict[str, Any] = kept) -> None:
            into["h"] = out.detach()

        return default
    if kind == "partial":
        return partial(lambda into, module, args, out: into.update(h=[out]), kept)
    if kind == "object":
        return Keeper(kept).keep
    return lambda module, args, out: kept.setdefault("h", {}).setdefault("list", []).append(out)


class Keeper:
    """Keeps the last output."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept

    def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.last = out
        self.kept["h"] = out


@pytest.mark.parametrize("kind", ["closure", "default", "partial", "object", "deeper"])
def test_a_hook_that_keeps_a_tensor_is_refused_by_its_module(kind: str) -> None:
    model, kept = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), dict[str, Any]()
    model[1].register_forward_hook(_keeps(kind, kept))
    with pytest.raises(CaptureError, match="a forward hook of 1 keeps a tensor"):
        memgraph.compile(model, "1GB")(X)
    assert kept == {}


def test_a_hook_that_counts_as_well_is_refused() -> None:
    model, kept, total = nn.Sequential(nn.Linear(16, 4)), list[Tensor](), {"calls": 0}

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        kept.append(out)
        total["calls"] += 1

    model[0].register_forward_hook(hook)
    with pytest.raises(CaptureError, match="a forward hook of 0 keeps a tensor"):
        memgraph.compile(model, "1GB")(X)
    assert (kept, total) == ([], {"calls": 0})


class Checked(nn.Module):
    """Asks for a value, so that forward runs once before it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if not torch.isfinite(y).all():
            raise ValueError("not finite")
        return y


def test_the_same_where_a_forward_runs_first_to_find_values() -> None:
    model, kept = Checked(), list[Tensor]()
    model.layer.register_forward_hook(lambda module, args, out: kept.append(out))  # pyright: ignore[reportArgumentType] # `out` is a tensor
    with pytest.raises(CaptureError, match="a forward hook of layer keeps a tensor"):
        memgraph.compile(model, "1GB")(X)
    assert kept == []


def test_a_hook_that_counts_warns() -> None:
    model, seen = nn.Sequential(nn.Linear(16, 4)), list[str]()
    model[0].register_forward_hook(lambda module, args, out: seen.append("called"))
    with pytest.warns(RuntimeWarning, match="a forward hook of 0 changes what it refers to"):
        memgraph.compile(model, "1GB")(X)


def test_a_hook_that_computes_is_captured() -> None:
    model = nn.Sequential(nn.Linear(16, 4))
    scale = {"by": 3.0}
    model[0].register_forward_hook(lambda module, args, out: out * scale["by"])  # pyright: ignore[reportOperatorIssue] # `out` is a tensor
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(memgraph.compile(model, "1GB")(X), model(X))
