"""An error while a step is captured names the module, the line and the option."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.compare import same_gradients

ROOM = "1GB"


class Around(nn.Module):
    """Something in a path of its own."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), part)

    def forward(self, *args: Any) -> Any:
        return self.body[1](self.body[0](args[0]), *args[1:])


def test_a_batch_norm_without_momentum_is_refused_by_its_path_and_option() -> None:
    compiled = memgraph.compile(Around(nn.BatchNorm1d(8, momentum=None)), ROOM, opaque=False)
    with pytest.raises(
        memgraph.CaptureError,
        match=r"test_explain_errors\.py:\d+ in forward, in body\.1 \(BatchNorm1d\): with momentum=None",
    ):
        compiled(torch.ones(3, 8))


class Encoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1).eval()

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        y: Tensor = self.encoder(x[None], src_key_padding_mask=padding)
        return y


@pytest.mark.parametrize(
    ("part", "args", "says"),
    [
        (Encoded(), (torch.tensor([[False, False, True]]),), "nested tensor .*\n.*enable_nested_tensor=False"),
    ],
)
def test_what_torch_cannot_describe_is_refused_with_what_helps(part: nn.Module, args: Any, says: str) -> None:
    module = Around(part)
    with torch.no_grad():
        module(torch.ones(3, 8), *args)
        with pytest.raises(memgraph.CaptureError, match=rf"in forward, in body\.1(\.encoder)? .*{says}") as caught:
            memgraph.compile(module, ROOM, opaque=False)(torch.ones(3, 8), *args)
    assert caught.value.__cause__ is not None


class Ragged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nested.nested_tensor([x[:1], x]).to_padded_tensor(0.0)


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), x[0, :2], (2, 2)).to_dense()


@pytest.mark.parametrize(
    "part, says",
    [(Ragged(), r"rows of several lengths.*\n.*mask what follows"), (Sparse(), r"a sparse tensor.*\n.*index_add")],
)
def test_tensors_that_are_not_dense_are_refused_in_one_sentence(part: nn.Module, says: str) -> None:
    with pytest.raises(memgraph.CaptureError, match=says):
        memgraph.compile(Around(part), ROOM, opaque=False)(torch.ones(3, 8))


def test_an_error_of_torch_outside_of_the_model_is_a_capture_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "grad", torch.ops.aten.relu.default)  # which takes other arguments
    with pytest.raises(memgraph.CaptureError, match="no line of the model's own runs"):
        memgraph.compile(nn.Linear(8, 8), ROOM)(torch.ones(3, 8))


def test_shapes_that_do_not_fit_are_named_with_their_module_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    compiled = memgraph.compile(Around(nn.Linear(7, 8)), ROOM)
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match=r"in body\.1 \(Linear\)") as caught:
        compiled(torch.ones(3, 8))
    assert type(caught.value) is RuntimeError
    assert "reduction dim" in str(caught.value)
    assert not caplog.records
    assert "meta" not in capfd.readouterr().err
    assert not logging.getLogger("torch._subclasses.fake_tensor").filters


def test_a_target_that_does_not_fit_is_the_error_of_eager() -> None:
    compiled = memgraph.compile(nn.Linear(4, 3), ROOM, loss=nn.functional.cross_entropy)
    with pytest.raises(ValueError, match=r"^Expected input batch_size \(8\) to match target batch_size \(3\).$"):
        compiled(torch.ones(8, 4), target=torch.ones(3, dtype=torch.long))
    with pytest.raises(RuntimeError, match="an unknown line, in the model"):
        compiled(torch.ones(8, 4), target=torch.ones(8))


def test_an_error_of_the_users_own_stays_what_it_is() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("not today")

    compiled = memgraph.compile(Around(Own()), ROOM)
    with pytest.raises(RuntimeError, match=r"^not today$"):
        compiled(torch.ones(3, 8))


class Doubled(torch.autograd.Function):
    """Is doubled by numpy, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: bool) -> Tensor:
        ctx.backward = backward
        return x * 2 if backward else torch.from_numpy(x.numpy() * 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return (torch.from_numpy(gradient.numpy() * 2) if ctx.backward else gradient * 2), None


class ByNumpy(nn.Module):
    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Doubled.apply(x, self.backward)  # type: ignore[no-untyped-call]
        return y


@pytest.mark.parametrize("backward", [False, True])
def test_numpy_in_a_function_of_autograd_is_refused_with_its_line_and_what_helps(backward: bool) -> None:
    module = Around(ByNumpy(backward))
    module(torch.ones(3, 8)).sum().backward()
    line = r"test_explain_errors\.py:\d+ in " + ("backward" if backward else r"forward, in body\.1 \(ByNumpy\)")
    with pytest.raises(memgraph.CaptureError, match=line + ": a tensor becomes a numpy array.*\n.*custom_op"):
        memgraph.compile(module, ROOM, opaque=False)(torch.ones(3, 8))


@torch.library.custom_op("memgraph_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 3)


torch.library.register_autograd("memgraph_tests::tripled", lambda ctx, gradient: gradient * 3)


class Tripled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return tripled(x)


def test_an_op_without_a_fake_is_refused_with_what_helps_and_that_does() -> None:
    module = Around(Tripled())
    layer: Any = module.body[0]
    with pytest.raises(memgraph.CaptureError, match=r"in body\.1 \(Tripled\): .*without data.*\n.*register_fake"):
        memgraph.compile(module, ROOM, opaque=False)(torch.ones(3, 8))
    tripled.register_fake(torch.empty_like)
    found = []
    for model in (module, memgraph.compile(module, ROOM)):
        module.zero_grad()
        model(torch.ones(3, 8)).square().sum().backward()
        found.append(layer.weight.grad)
    assert torch.equal(*found)


def test_averages_over_all_batches_are_taken_of_a_compiled_module_as_of_a_plain_one() -> None:
    module = Around(nn.BatchNorm1d(8))
    plain, compiled = copy.deepcopy(module), memgraph.compile(module, ROOM)
    compiled(torch.ones(3, 8)).sum().backward()
    plain(torch.ones(3, 8)).sum().backward()
    batches = [torch.rand(3, 8) for _ in range(2)]
    for model in (compiled, plain):
        torch.optim.swa_utils.update_bn(batches, model)
        assert model.body[1].momentum == 0.1
    assert all(map(torch.equal, module.buffers(), plain.buffers()))


def test_averages_over_all_batches_that_are_refused_say_what_helps_and_that_does() -> None:
    norm, batches = nn.BatchNorm1d(8), [torch.rand(3, 8) for _ in range(2)]
    with pytest.raises(memgraph.CaptureError, match=r"opaque=True.*momentum=0\.1, .*update_bn .*does not restore"):
        torch.optim.swa_utils.update_bn(batches, memgraph.compile(norm, ROOM))
    assert norm.momentum is None
    memgraph.compile(Around(norm), ROOM)(batches[0])
    norm.momentum = 0.1
    memgraph.compile(norm, ROOM)(batches[0])


def checked(h: Tensor) -> Tensor:
    if h.__class__ is not Tensor:
        raise TypeError("h has to be a tensor")
    return h


class Checking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 2

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Tensor:
        return checked(tangents[0]) * 2


class Then(nn.Linear):
    def __init__(self, then: Any) -> None:
        super().__init__(4, 4)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.then(super().forward(x))
        return y


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (checked, r"(?s)test_explain_errors\.py:\d+ in checked.*isinstance\(x, torch\.Tensor\).*h has to be a tensor"),
        (Checking.apply, r"(?s)test_explain_errors\.py:\d+ in checked.*custom_op.*h has to be a tensor"),
        (lambda h: h * bool(h.data_ptr()), r"reads the memory of a tensor \(data_ptr\).*custom_op"),
        (lambda h: h * torch.utils.dlpack.from_dlpack(h.detach()), r"reads the memory of a tensor \(__dlpack__\)"),
        (lambda h: h * copy.deepcopy(h.detach()), r"reads the memory of a tensor \(__deepcopy__\).*clone it"),
        (lambda h: h * pickle.loads(pickle.dumps(h.detach())), r"reads the memory of a tensor \(__reduce_ex__\)"),
        (lambda h: h * h.detach().share_memory_(), r"(?s)forward does not on real ones.*RuntimeError: "),
    ],
)
def test_what_only_fails_in_a_trace_is_refused_with_what_helps(then: Any, said: str) -> None:
    with pytest.raises(memgraph.CaptureError, match=said):
        memgraph.compile(Then(then), ROOM)(torch.ones(2, 4)).sum().backward()


def test_a_submodule_that_only_fails_in_a_trace_runs_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Then(checked))
    twin, x = copy.deepcopy(model), torch.ones(2, 4)
    compiled = memgraph.compile(model, ROOM)
    for each in (compiled, twin):
        each(x).sum().backward()
    assert same_gradients(model, twin)


def test_an_error_of_ones_own_stays_as_it_is() -> None:
    class OwnError(Exception):
        pass

    def fail(h: Tensor) -> Tensor:
        raise OwnError("mine")

    with pytest.raises(OwnError, match=r"^mine$"):
        memgraph.compile(Then(fail), ROOM)(torch.ones(2, 4))
