"""Where a real op returns another layout than its fake, the views of it are views of the real one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from memgraph import CaptureError
from memgraph.capture.capture import capture
from memgraph.graph.nodes import aten
from memgraph.graph.result_layout import ResultLayout
from memgraph.graph.summarize import summarize
from memgraph.profile.correct_fakes import apply_profiled_layouts
from memgraph.tensors.loss_outputs import select_all


class Windows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * 2).view(4, 2, 3, 6).permute(0, 2, 1, 3).clone()


def test_views_of_a_corrected_value_hold_its_storage() -> None:
    captured = capture(Windows(), (torch.randn(4, 6, 6, requires_grad=True),), {}, grad=True, wanted=select_all)
    graph = captured.graph.graph
    mul = next(iter(graph.find_nodes(op="call_function", target=aten.mul.Tensor)))

    def layouts(node: fx.Node) -> tuple[ResultLayout, ...] | None:
        return (ResultLayout((torch.float32, (4, 6, 6), (36, 1, 6)), 0, 576),) if node is mul else None

    apply_profiled_layouts(graph, layouts)
    assert mul.meta["val"].stride() == (36, 1, 6)
    of = {op.name: op for op in summarize(graph).ops}
    views = [node.name for node in graph.nodes if node.target in (aten.view.default, aten.permute.default)]
    first = [name for name in views if of[name].phase == "forward"]
    assert len(first) == 2 and all(of[name].holds == of[mul.name].holds and not of[name].makes for name in first)


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * 2).view(4, 36).clone()


def test_a_view_that_a_corrected_value_does_not_allow_is_refused() -> None:
    captured = capture(Rows(), (torch.randn(4, 6, 6, requires_grad=True),), {}, grad=True, wanted=select_all)
    graph = captured.graph.graph
    mul = next(iter(graph.find_nodes(op="call_function", target=aten.mul.Tensor)))

    def layouts(node: fx.Node) -> tuple[ResultLayout, ...] | None:
        return (ResultLayout((torch.float32, (4, 6, 6), (36, 1, 6)), 0, 576),) if node is mul else None

    with pytest.raises(CaptureError, match=r"aten.view.default can't view mul.*aten.mul.Tensor.*a larger budget"):
        apply_profiled_layouts(graph, layouts)
