"""A captured step computes what eager computes, to the last bit."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memgraph
from memgraph.capture.capture import capture
from memgraph.graph.captured import Input, Output, Ref
from memgraph.guards.module_proxy import WithLoss
from memgraph.tensors.loss_outputs import select_losses
from tests.support.captured_calls import TOKENS, Plain, X, agrees
from tests.support.models import Function


class Everyday(nn.Module):
    """Batch norm, dropout, an op in place, keywords, a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Linear(8, 2),
        )

    def forward(self, x: Tensor, *, scale: float, extra: dict[str, Tensor]) -> dict[str, Any]:
        hidden = self.drop(F.relu(self.norm(self.first(x)), inplace=True)) * scale
        return {"out": self.last(hidden) + extra["bias"], "hidden": hidden, "scale": scale, "none": None}


@pytest.mark.parametrize("training", [True, False])
def test_everyday_layers(training: bool) -> None:
    agrees(Everyday().train(training), X, scale=2.0, extra={"bias": torch.ones(2)})


class Tied(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(7, dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.index_add_(0, tokens.flatten(), torch.ones_like(tokens.flatten()))
        return self.head(torch.tanh(self.head(self.embedding(tokens))) @ self.embedding.weight)


def test_a_tied_weight_is_one_input_with_one_gradient() -> None:
    captured = agrees(Tied(), TOKENS)
    assert captured.inputs[:2] == (Input("parameter", "embedding.weight"), Input("buffer", "seen"))
    assert captured.outputs == (Output("output", index=0), Output("gradient", "embedding.weight"))


@pytest.mark.parametrize("cache", [True, False])
def test_autocast(cache: bool) -> None:
    agrees(Tied(), TOKENS, context=lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=cache))


def test_backward_is_outside_of_autocast() -> None:
    def precise(model: Any, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return h.float() @ model.linear.weight

    agrees(Plain(precise), X, context=lambda: torch.autocast("cpu", torch.bfloat16))


class Counting(nn.Module):
    """Changes a buffer, so that the step is traced twice, beside an attention that autocast runs in parts."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.attention(x, x, x, need_weights=False)[0]


def test_the_second_trace_casts_nothing_again() -> None:
    agrees(Counting(), torch.randn(4, 20, 16), context=lambda: torch.autocast("cpu", torch.bfloat16))


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.frozen(x))


def test_gradients_of_inputs_and_none_for_what_is_frozen_or_unused() -> None:
    captured = agrees(Partly(), X.clone().requires_grad_())
    gradients = [(role.kind, role.name) for role in captured.outputs[1:]]
    assert gradients == [("gradient", "used.weight"), ("gradient", "used.bias"), ("input_gradient", "")]


def test_outputs_that_have_no_gradient() -> None:
    captured = agrees(Plain(lambda m, h: (h, h.detach(), h.argmax(-1), h > 0, None, [h, h.view(-1)], "text")), X)
    assert captured.tangents == (0, 4)  # the second `h` is the first one
    outputs = [torch.tensor(float(i)) for i in range(5)]
    a, b, c, d, none, (e, f), text = captured.result(captured.fill(outputs, []))
    assert [a, b, c, d, e, f, none, text] == [*outputs[:4], outputs[0], outputs[4], None, "text"]


def test_inputs_are_handed_through_and_views_of_them_are_copied() -> None:
    class Through(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.table = nn.Linear(4, 4), torch.arange(4.0)
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x: Tensor) -> Any:
            return (
                x,
                x[:, 0],
                self.mean,
                self.linear(x) * self.table,
                self.linear.weight,
                self.table,
                self.mean.view(2, 2),
            )

    captured = agrees(Through(), X.clone().requires_grad_())
    # The gradients of x and of its view are summed in the graph, so both come out of it.
    assert captured.leaves[0] == Ref("output", 0) and captured.leaves[2] == Ref("input", 2)


@pytest.mark.parametrize("kind", ["reentrant", "plain", "partial", "first"])
def test_a_users_checkpoint_draws_no_second_mask(kind: str) -> None:
    run: Any = functools.partial(checkpoint, use_reentrant=kind in ("reentrant", "first"))
    if kind == "plain":
        run = lambda *args: checkpoint(*args, use_reentrant=False)  # noqa: E731

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
            self.block = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            # Without an input that requires a gradient, the reentrant kind gives the block none.
            return self.after(run(self.block, x if kind == "first" else self.before(x)))

    agrees(Model(), X)


def test_dropout_on_a_transposed_tensor_draws_in_the_order_of_memory() -> None:
    agrees(Plain(lambda m, h: F.dropout(h.t(), 0.5) * 2), X)


CYCLES = [(1, 2, 0), (2, 0, 1), (0, 3, 1, 2), (0, 2, 3, 1), (1, 2, 3, 0)]


@pytest.mark.parametrize("order", CYCLES)
def test_a_permuted_input_that_is_returned_has_its_order(order: tuple[int, ...]) -> None:
    x = torch.arange(3.0 ** len(order)).view([3] * len(order))
    agrees(Plain(lambda m, h: (h, x.permute(order))), X)
    agrees(Function(lambda inner, x: x.permute(order)), x.clone().requires_grad_())


@pytest.mark.parametrize("order", CYCLES)
def test_a_gradient_that_is_copied_has_the_order_of_its_parameter(order: tuple[int, ...]) -> None:
    weight = torch.randn([3] * len(order)).permute(order)

    class Expanded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum(-1)  # its gradient is in another order

    agrees(Expanded(), torch.randn([3] * len(order)))


@pytest.mark.long
@pytest.mark.parametrize("order", list(permutations(range(3))) + [(0, 3, 1, 2), (0, 2, 3, 1)])
def test_dropout_draws_in_the_order_of_memory_whatever_that_is(order: tuple[int, ...]) -> None:
    h = torch.randn((4,) * len(order))  # a mask with two dimensions swapped would fit as well
    agrees(Plain(lambda m, h: F.dropout(h.permute(order), 0.5).sin()), h)
    agrees(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), X.view(1, 2, 4))


def test_what_is_drawn_and_not_used_is_drawn() -> None:
    agrees(Plain(lambda m, h: (torch.rand(3), F.dropout(h))[1]), X)


@pytest.mark.parametrize("onednn", [True, False])
def test_recurrent_layers(onednn: bool) -> None:
    agrees(nn.LSTM(4, 3, 2, dropout=0.2), X.view(2, 1, 4), context=lambda: torch.backends.mkldnn.flags(enabled=onednn))


def test_onednns_recurrent_layer_makes_its_workspace_in_a_graph() -> None:
    graph = capture(nn.LSTM(4, 3), (X.view(2, 1, 4),), {}).graph.graph
    targets = {str(node.target) for node in graph.nodes}
    assert "memgraph_surrogates.rnn_layer.default" in targets and "aten.mkldnn_rnn_layer.default" not in targets


def test_a_view_that_leads_back_is_no_op() -> None:
    graph = capture(nn.Linear(4, 4), (X,), {}).graph.graph
    transposed = [node for node in graph.nodes if node.target is torch.ops.aten.t.default]
    assert not [node for node in transposed if node.args[0] in transposed]


def test_without_gradients_there_is_no_backward() -> None:
    agrees(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4)), X, context=torch.no_grad)
    for captured in (capture(nn.Linear(4, 4), (X,), {}, grad=False), capture(nn.ReLU(), (X,), {})):
        assert captured.outputs == (Output("output", index=0),) and captured.tangents == ()
    with torch.inference_mode():
        assert len(capture(nn.Linear(4, 4), (X,), {}).outputs) == 1


def test_the_loss_can_be_inside() -> None:
    captured = capture(WithLoss(nn.Linear(4, 4), lambda out: out.square().mean()), (X,), {})
    model = nn.Linear(4, 4)
    with torch.no_grad():
        loss, *_ = captured.graph(*model.parameters(), X, torch.ones(()))
    assert torch.equal(loss, model(X).square().mean())


def test_backward_only_from_what_is_wanted() -> None:
    captured = agrees(Plain(lambda m, h: (h, h.sum(), h.mean())), X, wanted=select_losses)
    assert captured.differentiable == (0, 1, 2) and captured.tangents == (1, 2)


def test_tensors_made_in_forward_are_constants() -> None:
    captured = agrees(Plain(lambda m, h: h * torch.tensor([1.0, 2.0, 3.0, 4.0]) if torch.arange(4).sum() > 5 else h), X)
    (constant,) = captured.graph.graph.find_nodes(op="get_attr")
    assert type(getattr(captured.graph, constant.target)) is Tensor


def test_capture_leaves_no_trace_on_the_module() -> None:
    def then(model: Any, h: Tensor) -> Tensor:
        model.calls = 1
        model.log = model.log or ["called"]
        model.deep["log"].add("called")
        model.mean = model.mean + 1
        return h if model.log[0] == "called" else fail()

    def fail() -> Tensor:
        raise ValueError("no")

    for log in ([], ["fail"]):
        model: Any = Plain(then)
        model.log, model.deep = log, {"log": set()}
        before = [*model.parameters(), *model.buffers()]
        with nullcontext() if not log else pytest.raises(ValueError, match=r"^no$"):
            capture(model, (X,), {})
        assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))
        assert (
            not hasattr(model, "calls")
            and model.log is log
            and not model.deep["log"]
            and not hasattr(model.linear, "weight_orig")
        )


class Hooked(nn.Module):
    """Backward alone reads a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), [torch.tensor([1.0, 2.0, 3.0, 4.0])]

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.register_hook(lambda gradient: gradient * self.scale[0])
        return y.square().mean()


def test_a_constant_that_backward_alone_reads_belongs_to_forward() -> None:
    model, x = Hooked(), torch.randn(2, 4)
    model(x).backward()
    expected = model.layer.weight.grad
    model.zero_grad()
    memgraph.compile(model, "1MB")(x).backward()
    assert expected is not None and model.layer.weight.grad is not None
    assert torch.equal(model.layer.weight.grad, expected)
