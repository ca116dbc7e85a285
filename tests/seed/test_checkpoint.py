"""A recomputed module does what FairScale's checkpoint does, or should have done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import memgraph
from passes import Recompute
from tests.support.compare import Fact
from tests.support.seed_modules import Function, assert_alike, batch, linear


def test_forward_is_python_only_while_it_is_captured(tmp_path: Path) -> None:
    """So a layer can't tell a second run from the first, and needs not."""
    calls = tmp_path / "calls"

    def function(net: Any, x: Tensor) -> Tensor:
        with calls.open("a") as file:
            file.write("forward\n")
        out: Tensor = net.b(net.a(x).tanh().exp())
        return out

    def loop(model: Any) -> list[Fact]:
        found: list[Fact] = []
        for seed in range(5):
            if seed == 2:  # it was captured without and with gradients to add to
                assert calls.read_text()
                calls.write_text("")
            made = model(batch(seed=seed)).square().sum()
            made.backward()
            found.append(made)
        return found

    model = assert_alike(loop, lambda: Function(function))
    assert not calls.read_text()
    assert any(isinstance(decision, Recompute) for decision in model.plan.plan)


def test_the_generator_is_where_eager_has_it_after_forward_and_after_backward() -> None:
    def loop(model: Any) -> list[Fact]:
        found: list[Fact] = []
        for _ in range(2):
            out = model(batch())
            found += [torch.get_rng_state(), torch.rand(3)]
            out.square().sum().backward()
            found += [torch.get_rng_state(), torch.rand(3)]
        return found

    model = assert_alike(loop, lambda: nn.Sequential(linear(), nn.Dropout(0.4), nn.GELU(), nn.Dropout(0.2), linear()))
    assert any(op.draws and op.recomputes for op in model.plan.forecast.trace.ops)


def test_what_has_nothing_to_train_stands_in_a_larger_graph() -> None:
    def loop(model: Any) -> list[Fact]:
        x, scale = batch(), torch.ones(8, requires_grad=True)
        out = model(x)
        assert not out.requires_grad
        (out * scale).square().sum().backward()
        return [x.grad, scale.grad]

    assert_alike(loop, lambda: nn.Sequential(nn.Tanh(), nn.Softmax(-1)))


def test_what_the_user_checkpoints_within_a_checkpoint_draws_the_same_masks() -> None:
    def inner(net: Any, x: Tensor) -> Tensor:
        return F.dropout(net.a(x).tanh(), 0.3)

    def outer(net: Any, x: Tensor) -> Tensor:
        out: Tensor = net.b(checkpoint(inner, net, x, use_reentrant=False))
        return F.dropout(out, 0.3)

    def function(net: Any, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(outer, net, x, use_reentrant=False)
        return out.square().mean()

    def loop(model: Any) -> list[Fact]:
        x = batch().requires_grad_()
        model(x).backward()
        return [x.grad]

    assert_alike(loop, lambda: Function(function))


def test_outputs_bear_the_flags_of_eager() -> None:
    """Integers, booleans, what depends on nothing that is trained, and what is cut off."""

    def function(net: Any, x: Tensor) -> tuple[Tensor, ...]:
        h = net.a(x).tanh()
        return h.argmax(-1), h > 0, x * 2, h.detach(), net.b(h), torch.ones(3)

    plain, compiled = Function(function)(batch()), memgraph.compile(Function(function), 10**9)(batch())
    assert [out.requires_grad for out in compiled] == [out.requires_grad for out in plain]
    assert [out.dtype for out in compiled] == [out.dtype for out in plain]
    assert_alike(lambda model: [(out := model(batch()))[4].square().sum().backward(), *out], lambda: Function(function))


@pytest.mark.long
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.filterwarnings("ignore:.*a loss was made of outputs:RuntimeWarning")
def test_any_outputs_may_be_used(used: tuple[int, ...]) -> None:
    def function(net: Any, x: Tensor) -> tuple[Tensor, ...]:
        h = net.b(net.a(x).tanh())
        return h.exp(), h * x, h.sin()

    def loop(model: Any) -> list[Fact]:
        found: list[Fact] = []
        for seed in range(2):
            x = batch(seed=seed).requires_grad_()
            outs = model(x)
            torch.stack([outs[i].square().sum() for i in used]).sum().backward()
            found.append(x.grad)
        return found

    assert_alike(loop, lambda: Function(function))


def test_outputs_and_their_gradients_are_paired_by_place() -> None:
    """The first of two outputs of one shape has no gradient: dz is 6, where FairScale's is 200."""

    def loop(model: Any) -> list[Fact]:
        z = torch.ones(2, requires_grad=True)
        constant, twice = model(z)
        (100 * constant.sum() + 3 * twice.sum()).backward()
        assert z.grad is not None
        assert z.grad.tolist() == [6.0, 6.0]
        return [z.grad]

    assert_alike(loop, lambda: Function(lambda net, z: (torch.ones_like(z), 2 * z)))


class Unchanged(torch.autograd.Function):
    """Returns its input, and doubles the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


@pytest.mark.parametrize("apply", [Unchanged.apply, nn.Identity()], ids=["function", "identity"])
def test_what_returns_its_input_unchanged_may_stand_anywhere(apply: Callable[..., Any]) -> None:
    def loop(model: Any) -> list[Fact]:
        x = batch().requires_grad_()
        model(x).square().sum().backward()
        return [x.grad]

    assert_alike(loop, lambda: Function(lambda net, x: apply(net.b(apply(net.a(apply(x)).tanh())))))


def test_a_tuple_of_one_stays_a_tuple_and_a_tensor_a_tensor() -> None:
    def loop(model: Any) -> list[Fact]:
        one, (other,), listed = model(batch()), model((batch(),)), model([batch()])
        assert [type(one), type(listed)] == [Tensor, list]
        (one + other + listed[0]).sum().backward()
        return [one, other, listed[0]]

    def function(net: Any, x: Any) -> Any:
        return net.a(x).tanh() if isinstance(x, Tensor) else type(x)([net.a(x[0]).tanh()])

    assert_alike(loop, lambda: Function(function))


@pytest.mark.parametrize("tied", [False, True])
def test_a_compiled_module_or_part_in_a_data_parallel_wrapper(tied: bool, tmp_path: Path) -> None:
    def loop(compiled: Callable[[nn.Module], nn.Module], whole: bool) -> list[Tensor]:
        first, last = linear(), linear()
        if tied:
            last.weight = first.weight
        part = nn.Sequential(first, nn.Tanh(), last)
        inner: nn.Module = part if whole else compiled(part)
        outer = nn.Sequential(inner, nn.ReLU(), linear())
        model = DistributedDataParallel(compiled(outer) if whole else outer)
        for seed in range(3):
            model(batch(seed=seed)).square().sum().backward()
        return [parameter.grad for parameter in outer.parameters() if parameter.grad is not None]

    with process_group(tmp_path):
        for whole in (True, False):
            theirs, ours = (
                loop(made, whole) for made in (lambda part: part, lambda part: memgraph.compile(part, 10**9))
            )
            assert len(ours) == len(theirs) > 4
            assert all(map(torch.equal, ours, theirs))


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """This process alone."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
