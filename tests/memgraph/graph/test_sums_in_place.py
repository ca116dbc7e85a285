"""Backward adds in place where nothing reads the first term later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from memgraph.capture.capture import capture
from memgraph.graph.aten_shims import COPY_WITH_STRIDES
from memgraph.graph.gradient_sums import with_sums_in_place
from memgraph.graph.nodes import aten, fake_result
from memgraph.graph.ops import accumulate
from memgraph.tensors.loss_outputs import select_losses


def backward(text: str) -> list[fx.Node]:
    """Return the sums of a backward after it: `a = neg x` on each line, `f` before the name for forward."""
    mode, graph, nodes = FakeTensorMode(), fx.Graph(), dict[str, fx.Node]()
    with mode:
        value = torch.empty(4, 4)
    ops = {"neg": aten.neg.default, "add": aten.add.Tensor, "t": aten.t.default, "sum": aten.sum.default}
    for line in ["x = input", *text.strip().splitlines()]:
        name, op, *reads = line.replace("=", " ").split()
        if op == "input":
            node = graph.placeholder(name)
            node.meta["val"] = value
        elif op == "laid":
            node = graph.call_function(COPY_WITH_STRIDES, (nodes[reads[0]], [4, 1]))
        else:
            node = graph.call_function(ops[op], tuple(nodes[read] for read in reads))
        if op != "input":
            node.meta["val"] = fake_result(node, mode)
        node.meta["phase"] = "forward" if name.startswith("f") else "backward"
        nodes[name] = node
    graph.output((nodes["out"],))
    return [node for node in with_sums_in_place(graph).nodes if node.target in (aten.add.Tensor, accumulate)]


@pytest.mark.parametrize(
    ("text", "in_place"),
    [
        ("a = neg x\nb = neg a\ns = add a b\nout = neg s", True),
        ("a = neg x\nb = neg a\ns = add a b\nc = neg a\nout = add c s", False),
        ("a = neg x\nv = t a\ns = add a x\nc = neg v\nout = add c s", False),
        ("fa = neg x\nb = neg fa\ns = add fa b\nout = neg s", False),
        ("s = add x x\nout = neg s", False),
        ("a = laid x\ns = add a x\nout = neg s", False),
        ("a = neg x\nv = sum a\ns = add v a\nout = neg s", False),
        ("a = neg x\nb = neg x\nout = add a b", False),
    ],
    ids=["own", "read later", "viewed later", "of forward", "input", "another library's", "other sizes", "returned"],
)
def test_a_sum_is_made_in_place_if_nothing_else_holds_its_first_term(text: str, in_place: bool) -> None:
    assert (backward(text)[0].target is accumulate) == in_place


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


def test_gradients_of_residuals_are_summed_in_one_tensor() -> None:
    captured = capture(Residual(), (torch.randn(4, 8),), {}, wanted=select_losses)
    sums = [node for node in with_sums_in_place(captured.graph.graph).nodes if node.target is accumulate]
    assert len(sums) == 2  # the input needs none
    assert len({node.meta["val"].untyped_storage()._cdata for node in sums}) == 1
