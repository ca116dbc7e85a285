"""Ever new shapes take no more and more memory of the process."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import graph_module

import memgraph
from memgraph.capture import fake_tensors
from memgraph.planning import variants
from memgraph.profile import op_profiler


@pytest.mark.filterwarnings("ignore:.*differs from call to call")
def test_what_is_remembered_of_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_profiler, "_known", {})
    monkeypatch.setattr(op_profiler, "KNOWN", 10)
    monkeypatch.setattr(fake_tensors, "MAX_CACHED_OPS", 100)
    monkeypatch.setattr(variants, "NODES", 0)
    compiled = memgraph.compile(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), "1GB")
    FakeTensorMode.cache_clear()
    sources: list[int] = []
    for rows in range(2, 14):
        compiled(torch.ones(rows, 4)).sum().backward()
        compiled.zero_grad()
        texts = [name for name in linecache.cache if name.startswith("<eval_with_key>")]
        sources.append(len(texts) + len(graph_module._loader.eval_cache))
        assert len(FakeTensorMode.cache) <= 100
        assert len(op_profiler._known) <= 10
    assert len(compiled._kept.steps) == variants.PLANS
    assert sources[-1] == sources[1]


def test_small_steps_are_kept_beyond_the_few() -> None:
    compiled = memgraph.compile(nn.Linear(4, 4), "1GB")
    for rows in range(2, 13):
        compiled(torch.ones(rows, 4))
    assert len(compiled._kept.steps) == 11
