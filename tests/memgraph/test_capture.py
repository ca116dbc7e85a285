"""A captured step computes what eager computes, to the last bit."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memgraph.capture import Captured, Input, Output, Ref, capture, everything, losses, operands
from memgraph.errors import CaptureError
from memgraph.trees import flatten, unflatten


def agrees(
    module: nn.Module,
    *args: Any,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    wanted: Any = everything,
    **kwargs: Any,
) -> Captured:
    """Capture a call, run the graph and the module under one seed, and compare all that comes out."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with context():
        captured = capture(module, args, kwargs, wanted=wanted)
    assert torch.equal(torch.get_rng_state(), before)

    twin, (twin_args, twin_kwargs) = copy.deepcopy(module), fresh((args, kwargs))
    twins = operands(twin, twin_args, twin_kwargs)
    torch.manual_seed(2)
    with context():
        result = twin(*twin_args, **twin_kwargs)
    outputs = outputs_of(captured, result, twins)
    assert captured.differentiable == tuple(i for i, output in enumerate(outputs) if output.requires_grad)
    tangents = [torch.randn_like(outputs[i]) for i in captured.tangents]
    if tangents:
        torch.autograd.backward([outputs[i] for i in captured.tangents], tangents)

    tensors = operands(module, args, kwargs)
    torch.manual_seed(2)
    with torch.no_grad():
        handed = dict(zip(captured.outputs, captured.graph(*tensors, *tangents), strict=True))
    assert_equal([value for role, value in handed.items() if role.kind == "output"], outputs)
    gradients = {role: value for role, value in handed.items() if role.kind != "output"}
    expected = eager_gradients(captured, twins)
    assert gradients.keys() == expected.keys()
    assert_equal(list(gradients.values()), [expected[role] for role in gradients])
    # What the module has changed of its buffers (under whatever name), parameters and inputs.
    assert_equal(tensors, operands(twin, twin_args, twin_kwargs))
    assert_owned(handed, [*tensors, *tangents])
    assert_well_formed(captured.graph.graph)
    return captured


def fresh(tree: Any) -> Any:
    """The same tree with tensors that are leaves of autograd."""
    leaves, spec = flatten(tree)
    return unflatten(
        [
            leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ],
        spec,
    )


def outputs_of(captured: Captured, result: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of an eager result in the order of the captured outputs, after a look at all the rest of it."""
    leaves, spec = flatten(result)
    assert spec.tree == captured.spec.tree
    found: dict[int, Tensor] = {}
    for leaf, ref in zip(leaves, captured.leaves, strict=True):
        if not isinstance(ref, Ref):
            assert leaf == ref
        elif ref.kind == "input":
            assert leaf is tensors[ref.index]
        else:
            assert found.setdefault(ref.index, leaf) is leaf
    return [found[i] for i in range(len(found))]


def eager_gradients(captured: Captured, tensors: Sequence[Tensor]) -> dict[Output, Tensor]:
    roles = [role for role in captured.inputs if role.kind != "tangent"]
    return {
        Output("gradient", role.name)
        if role.kind == "parameter"
        else Output("input_gradient", index=role.index): tensor.grad
        for role, tensor in zip(roles, tensors, strict=True)
        if tensor.grad is not None
    }


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        if is_whole(one) and is_whole(other):
            assert all(a == b or n == 1 for a, b, n in zip(one.stride(), other.stride(), one.shape, strict=True))


def is_whole(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def assert_owned(handed: Mapping[Output, Tensor], given: Sequence[Tensor]) -> None:
    """A parameter's gradient fills its storage, and nothing else holds it.  An output is no view of an input."""
    inputs = {tensor.untyped_storage().data_ptr() for tensor in given}
    assert len(set(map(id, handed.values()))) == len(handed)  # `h` and `h.detach()` are two
    storages = [tensor.untyped_storage().data_ptr() for tensor in [*handed.values(), *given]]
    for role, tensor in handed.items():
        if role.kind == "gradient":
            assert storages.count(tensor.untyped_storage().data_ptr()) == 1, role
            assert is_whole(tensor)
        assert role.kind != "output" or tensor.untyped_storage().data_ptr() not in inputs


def assert_well_formed(graph: fx.Graph) -> None:
    """Forward before backward; nothing is changed in place but inputs, at the end of forward."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    forward = [node for node in nodes if node.meta["phase"] == "forward"]
    assert nodes[: len(forward)] == forward
    assert all({"val", "where", "phase"} <= node.meta.keys() for node in graph.nodes if node.op != "output")
    late = {node for node in graph.nodes if node.meta.get("kind") == "tangent"}
    for node in nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
            assert node.meta["phase"] == "backward"
    changing = [node for node in nodes if getattr(getattr(node.target, "_schema", None), "is_mutable", False)]
    assert forward[len(forward) - len(changing) :] == changing
    for node in changing:
        assert node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"


class Plain(nn.Module):
    """A linear layer and whatever is done to its output."""

    def __init__(self, then: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("last", torch.zeros(4))
        self.then = then

    def forward(self, x: Tensor) -> Any:
        return self.then(self, self.linear(x))


X = torch.linspace(-1, 1, 8).view(2, 4)


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


TOKENS = torch.tensor([[1, 2, 2], [5, 0, 6]])


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


IDS = torch.arange(1, 25).view(2, 12)
MASK = (torch.arange(12) < torch.tensor([[12], [8]])).long()
SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_language_models_with_their_key_value_caches(name: str) -> None:
    agrees(MODELS[name](), input_ids=IDS, labels=IDS)


def test_a_language_model_under_a_padding_mask() -> None:
    captured = agrees(MODELS["gpt2"](), input_ids=IDS, attention_mask=MASK, labels=IDS, wanted=losses)
    assert captured.tangents == (0,) and len(captured.differentiable) > 1


def test_a_vision_model() -> None:
    config = transformers.ViTConfig(**{**SMALL, "image_size": 8, "patch_size": 4, "num_labels": 3})
    agrees(
        transformers.ViTForImageClassification(config),
        pixel_values=torch.randn(2, 3, 8, 8),
        labels=torch.tensor([0, 2]),
    )


def test_transformers_sees_no_tracing_where_values_are_known() -> None:
    graph = capture(MODELS["llama"](), (), {"input_ids": IDS, "labels": IDS, "use_cache": False}).graph.graph
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)  # no mask is built


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
    a, b, c, d, none, (e, f), text = captured.result(outputs, [])
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
    assert captured.leaves[0] == Ref("input", 3) and captured.leaves[2] == Ref("input", 2)


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
    agrees(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), X.view(1, 2, 4))


def test_what_is_drawn_and_not_used_is_drawn() -> None:
    agrees(Plain(lambda m, h: (torch.rand(3), F.dropout(h))[1]), X)


def test_a_parameter_that_forward_changes() -> None:
    agrees(nn.Sequential(nn.Embedding(7, 4, max_norm=0.5), nn.Linear(4, 2)), TOKENS)


def swap(model: Any, h: Tensor) -> Tensor:
    """Each buffer is assigned anew, one of them the other's old value, which backward reads as well."""
    out = h * model.mean
    model.last, model.mean = model.mean, 0.9 * model.mean + h.detach().abs().mean(0)
    return out + model.last


def in_place(model: Any, h: Tensor) -> Tensor:
    model.mean[1:].add_(h.detach()[0, 1:])
    model.last.copy_(model.mean).mul_(2)
    return h * model.last


def last_of_all(model: Any, h: Tensor) -> Tensor:
    out = h * 2
    model.mean[1:].add_(h.detach()[0, 1:])
    return out


def old_value(model: Any, h: Tensor) -> tuple[Tensor, Tensor]:
    old, model.mean = model.mean, model.mean * 2
    return h * model.mean, old


@pytest.mark.parametrize("then", [swap, in_place, last_of_all, old_value])
def test_buffers_that_forward_changes(then: Callable[[Any, Tensor], Any]) -> None:
    agrees(Plain(then), X)


def test_an_input_that_forward_changes() -> None:
    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            out = super().forward(input * 2)
            input.add_(1)
            input[0].zero_()
            return out, input

    agrees(Model(4, 4), X.clone())


def test_relu_in_place() -> None:
    agrees(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Dropout(0.5, inplace=True)), X)


def test_convolutions_keep_the_strides_of_their_weights() -> None:
    layers: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
    images = torch.randn(2, 3, 8, 8)
    agrees(layers, images)
    agrees(layers.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last))
    agrees(copy.deepcopy(layers).to(memory_format=torch.channels_last), images)


def test_gradients_that_are_one_tensor_are_copied() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))

        def forward(self) -> Any:
            return self.a + self.b, self.c.t(), self.a

    agrees(Heads())


def test_gradients_lie_in_memory_as_their_parameters_do() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.crossed, self.summed = nn.Parameter(torch.randn(4, 2).t()), nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Any:
            return x * 2 * self.crossed, self.summed.sum()

    agrees(Crossed(), X)


@pytest.mark.parametrize("onednn", [True, False])
def test_recurrent_layers(onednn: bool) -> None:
    agrees(nn.LSTM(4, 3, 2, dropout=0.2), X.view(2, 1, 4), context=lambda: torch.backends.mkldnn.flags(enabled=onednn))


def test_onednns_recurrent_layer_makes_its_workspace_in_a_graph() -> None:
    graph = capture(nn.LSTM(4, 3), (X.view(2, 1, 4),), {}).graph.graph
    targets = {str(node.target) for node in graph.nodes}
    assert "memgraph_kernels.rnn_layer.default" in targets and "aten.mkldnn_rnn_layer.default" not in targets


def test_a_view_that_leads_back_is_no_op() -> None:
    graph = capture(nn.Linear(4, 4), (X,), {}).graph.graph
    transposed = [node for node in graph.nodes if node.target is torch.ops.aten.t.default]
    assert not [node for node in transposed if node.args[0] in transposed]


def test_an_expanded_input_and_one_that_is_no_leaf() -> None:
    agrees(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), X[:1].expand(3, 4))
    captured = capture(nn.Linear(4, 4), (X.clone().requires_grad_() * 2,), {})
    assert captured.outputs[-1] == Output("input_gradient", index=0)


def test_without_gradients_there_is_no_backward() -> None:
    agrees(nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4)), X, context=torch.no_grad)
    for captured in (capture(nn.Linear(4, 4), (X,), {}, grad=False), capture(nn.ReLU(), (X,), {})):
        assert captured.outputs == (Output("output", index=0),) and captured.tangents == ()
    with torch.inference_mode():
        assert len(capture(nn.Linear(4, 4), (X,), {}).outputs) == 1


def test_the_loss_can_be_inside() -> None:
    captured = capture(nn.Linear(4, 4), (X,), {}, loss=lambda out: out.square().mean())
    model = nn.Linear(4, 4)
    with torch.no_grad():
        loss, *_ = captured.graph(*model.parameters(), X, torch.ones(()))
    assert torch.equal(loss, model(X).square().mean())


def test_backward_only_from_what_is_wanted() -> None:
    captured = agrees(Plain(lambda m, h: (h, h.sum(), h.mean())), X, wanted=losses)
    assert captured.differentiable == (0, 1, 2) and captured.tangents == (1, 2)


def test_tensors_made_in_forward_are_constants() -> None:
    captured = agrees(Plain(lambda m, h: h * torch.tensor([1.0, 2.0, 3.0, 4.0]) if torch.arange(4).sum() > 5 else h), X)
    (constant,) = captured.graph.graph.find_nodes(op="get_attr")
    assert type(getattr(captured.graph, constant.target)) is Tensor


def test_every_op_knows_where_it_comes_from() -> None:
    captured = capture(MODELS["gpt2"](), (), {"input_ids": IDS, "labels": IDS}, wanted=losses)
    nodes = captured.graph.graph.nodes
    places = {
        (node.meta["phase"], node.meta["where"].partition(":")[0]) for node in nodes if node.op == "call_function"
    }
    for phase in ("forward", "backward"):
        assert (phase, "transformer.h.1.mlp.act activations.py") in places
        assert (phase, "transformer.h.0.ln_1 modeling_gpt2.py") in places
    weight = next(iter(nodes))
    assert (weight.name, weight.meta["where"], weight.meta["kind"]) == (
        "transformer_wte_weight",
        "transformer.wte.weight",
        "parameter",
    )


def test_capture_leaves_no_trace_on_the_module() -> None:
    def then(model: Any, h: Tensor) -> Tensor:
        model.calls = getattr(model, "calls", 0) + 1
        model.log.append("called")
        model.mean = model.mean + 1
        return h if model.log[0] == "called" else fail()

    def fail() -> Tensor:
        raise ValueError("no")

    for log in ([], ["fail"]):
        model: Any = Plain(then)
        model.log = log
        before = [*model.parameters(), *model.buffers()]
        with nullcontext() if not log else pytest.raises(ValueError, match=r"^no$"):
            capture(model, (X,), {})
        assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))
        assert not hasattr(model, "calls") and len(model.log) < 2 and not hasattr(model.linear, "weight_orig")


def branch(model: Any, h: Tensor) -> Tensor:
    if h.sum() > 0:  # the line that is named
        return h
    return -h


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (branch, "Python asks for a tensor's value"),
        (lambda m, h: h * h.max().item(), "Python asks for a tensor's value"),
        (lambda m, h: h[h > 0], "the shape of a result depends on"),
        (lambda m, h: h.detach().numpy(), "Python asks for a tensor's value"),
    ],
)
def test_what_depends_on_data_is_refused_with_its_line(then: Callable[[Any, Tensor], Any], says: str) -> None:
    with pytest.raises(CaptureError, match=says) as caught:
        capture(Plain(then), (X,), {})
    line = then.__code__.co_firstlineno + (then is branch)
    assert f"{__file__}:{line} in {then.__name__}" in str(caught.value)


def test_a_users_own_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="broadcast") as caught:
        capture(Plain(lambda m, h: h + torch.ones(3)), (X,), {})
    assert not isinstance(caught.value, CaptureError)


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_a_decision_that_python_draws_is_refused(draw: Callable[[], float]) -> None:
    states = random.getstate(), str(numpy.random.get_state())
    with pytest.raises(CaptureError, match="which would be the same in every step"):
        capture(Plain(lambda m, h: h if draw() < 0.5 else -h), (X,), {})
    assert states == (random.getstate(), str(numpy.random.get_state()))


def keep(model: Any, h: Tensor) -> Tensor:
    model.auxiliary = h.sum()
    return h


def reshape(model: Any, h: Tensor) -> Tensor:
    model.mean = h.detach()
    return h


def count(model: Any, h: Tensor) -> Tensor:
    model.table += 1
    return h


def train(model: Any, h: Tensor) -> Tensor:
    return h * model.table


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (keep, "forward stores a tensor in auxiliary"),
        (reshape, r"assigns torch.float32 \(2, 4\) to buffer mean"),
        (count, "changes the tensor table in place, which is no buffer"),
        (train, "the tensor table requires a gradient but is no parameter"),
    ],
)
def test_what_would_silently_be_lost_is_refused(then: Callable[[Any, Tensor], Any], says: str) -> None:
    model: Any = Plain(then)
    model.table = torch.ones(4, requires_grad=then is train)
    with pytest.raises(CaptureError, match=says):
        capture(model, (X,), {})


def test_memory_under_two_names_must_not_change() -> None:
    model: Any = Plain(in_place)
    model.last = model.mean[:]
    with pytest.raises(CaptureError, match="buffer mean in place, which shares its memory with buffer last"):
        capture(model, (X,), {})


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(CaptureError, match="use sparse=False"):
        capture(nn.Embedding(7, 4, sparse=True), (TOKENS,), {})
