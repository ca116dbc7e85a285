"""A length that uses the step with symbols has the text, the code and the tangents that its own graph has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.graph.halves.partition import Partition, partition
from memgraph.graph.rewrite import rewrite
from memgraph.graph.summarize import summarize
from memgraph.planning.lengths import general_graph
from memgraph.planning.lengths.general_graph import NAME
from memgraph.planning.step_graph import StepGraph
from passes import Op, Trace


class Block(nn.Module):
    """Attention with dropout, whose values are viewed, added to and sliced."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inside, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inside(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        weights = F.dropout((query @ key.mT / 2.0).softmax(-1), 0.1)
        return x + F.gelu(self.out((weights @ value).transpose(1, 2).reshape(x.shape)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.blocks(self.embed(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits


@dataclass
class Shared:
    """The steps that were made of one with symbols, and whether their own graphs give the same."""

    texts: list[bool] = field(default_factory=list)
    codes: list[bool] = field(default_factory=list)
    steps: list[StepGraph] = field(default_factory=list)
    own: int = 0


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    seen, halves_of = Shared(), StepGraph.halves

    def halves(step: StepGraph, applied: Trace) -> Partition | None:
        found = halves_of(step, applied)
        if step.at_length is None or found is None:
            seen.own += 1
            return found
        own = step.with_numbers()
        seen.steps.append(step)
        seen.texts.append(step.summarize() == summarize(own.graph))
        rewritten = rewrite(own.graph, applied)
        seen.codes.append(is_same(found, partition(rewritten, own.captured.graph)))
        return found

    monkeypatch.setattr(StepGraph, "halves", halves)
    yield seen


def is_same(one: Partition, other: Partition) -> bool:
    """Return True if two partitions run the same code, with numbers in place of names."""
    if (one.tangent_names, one.caller_values) != (other.tangent_names, other.caller_values):
        return False
    layouts = [[(x.shape, x.stride(), x.dtype) for x in each.tangents] for each in (one, other)]
    halves = zip((one.forward, one.backward), (other.forward, other.backward), strict=True)
    return layouts[0] == layouts[1] and all(
        half is like or (half is not None and like is not None and is_same_half(half, like)) for half, like in halves
    )


def is_same_half(half: torch.fx.GraphModule, like: torch.fx.GraphModule) -> bool:
    scope = half.forward.__globals__
    numbered = re.sub(rf"{NAME}\d+", lambda name: str(scope[name[0]]), half.code)
    return numbered == like.code and half.graph.python_code("self").src == like.code


def losses(model: nn.Module, lengths: Sequence[int], step: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
    found = []
    for length in lengths:
        torch.manual_seed(length)
        loss, _ = step(torch.randint(0, 30, (8, length)))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    return found


@pytest.mark.long
@pytest.mark.parametrize("share", (1.2, 0.6))
@pytest.mark.parametrize("accumulate", (None, False, True))
def test_text_and_code_of_a_length_are_those_of_its_own_graph(
    shared: Shared, share: float, accumulate: bool | None
) -> None:
    model, lengths = Stack(), (24, 21, 19, 23, 18, 22, 17, 20)
    budget = int(share * memgraph.plan(model, torch.zeros(8, 24, dtype=torch.int64), budget="1GB").peak)
    step = memgraph.compile(model, budget, offload=None, accumulate=accumulate)
    found, expected = losses(model, lengths, step), losses(model, lengths, model)
    assert all(map(torch.equal, found, expected))
    assert len(shared.texts) == len(lengths) - 2 and all(shared.texts) and all(shared.codes)
    assert all((report.measured or budget) <= report.peak <= budget for report in step.plans)


@pytest.mark.long
def test_lengths_with_the_same_decisions_have_one_code(shared: Shared) -> None:
    model = Stack()
    step = memgraph.compile(model, accumulate=False)
    losses(model, (24, 21, 19, 23, 18), step)
    forwards = [kept.parts.halves.forward.forward for kept in step._kept.steps]
    assert len({forward.__code__ for forward in forwards[2:]}) == 1


@pytest.mark.long
def test_a_plan_that_offloads_has_code_of_its_own(shared: Shared) -> None:
    model = Stack()
    losses(model, (24, 21, 19), memgraph.compile(model, accumulate=False))
    at_length, text = shared.steps[0].at_length, shared.steps[0].summarize()
    assert at_length is not None
    offload = Op("linear__offload", "memgraph.offload.default", (text.ops[-1].name,), phase="backward")
    assert at_length.halves(text) is not None
    assert at_length.halves(Trace((*text.ops, offload), text.outputs)) is None


@pytest.mark.long
def test_a_length_whose_real_layouts_differ_has_a_graph_of_its_own(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack()
    monkeypatch.setattr(general_graph.GraphAtLength, "has_layouts", lambda *given: False)
    step = memgraph.compile(model, accumulate=False)
    lengths = (24, 21, 19, 23)
    assert all(map(torch.equal, losses(model, lengths, step), losses(model, lengths, model)))
    assert not shared.texts and shared.own >= len(lengths)
