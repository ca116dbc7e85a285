"""Effects of forward beside its results are refused by name, and taken back."""

from __future__ import annotations

import contextvars
import copy
import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.errors import CaptureError

ROOM = 1 << 30
LOGGER = logging.getLogger("a_logger_of_effects")
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("a_variable_of_effects", default=0)
LOCAL = threading.local()
X = torch.linspace(-1, 1, 8).view(2, 4)


class Net(nn.Module):
    """Does something before its layer runs."""

    width = 0
    shift: Tensor

    def __init__(self, does: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.does = nn.Linear(4, 4), does
        self.register_buffer("shift", torch.zeros(4))
        self.held: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.does(self, x)
        y = self.layer(x) + self.shift
        return y.square().mean()


def state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(), torch.get_num_threads(), torch.backends.cudnn.benchmark, np.geterr(),
        LOGGER.level, torch.is_autocast_enabled("cpu"), torch.is_anomaly_enabled(),
    )  # fmt: skip


SETTINGS: dict[str, Callable[[Any, Tensor], Any]] = {
    "the grad mode": lambda m, x: torch.set_grad_enabled(False),
    "the default dtype": lambda m, x: torch.set_default_dtype(torch.float64),
    "torch.use_deterministic_algorithms": lambda m, x: torch.use_deterministic_algorithms(True),
    "torch.set_float32_matmul_precision": lambda m, x: torch.set_float32_matmul_precision("high"),
    "torch.set_num_threads": lambda m, x: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch.backends.cudnn.benchmark": lambda m, x: setattr(torch.backends.cudnn, "benchmark", True),
    "numpy.seterr": lambda m, x: np.seterr(divide="ignore"),
    "the level of a logger": lambda m, x: LOGGER.setLevel(10),
    "autocast": lambda m, x: torch.set_autocast_enabled("cpu", True),
    "torch.autograd.set_detect_anomaly": lambda m, x: torch.autograd.set_detect_anomaly(True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_process_is_left_with_is_refused_and_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # helpers of torch, which another test may have imported, forbid torch.backends to be set for good
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    before = state()
    with pytest.raises(CaptureError, match=f"forward sets {name}.*, and leaves it so, but no captured step does so"):
        memgraph.compile(Net(SETTINGS[name]), ROOM)(X)
    assert state() == before


def test_what_is_undone_is_allowed() -> None:
    def does(module: Any, x: Tensor) -> None:
        with torch.no_grad(), np.errstate(divide="ignore"), torch.autocast("cpu", enabled=False):
            torch.set_default_dtype(torch.float64)
            torch.set_default_dtype(torch.float32)
        module.layer.requires_grad_(False)
        module.layer.requires_grad_(True)
        VARIABLE.reset(VARIABLE.set(3))

    plain, ours = Net(does), Net(does)
    plain(X).backward()
    memgraph.compile(ours, ROOM)(X).backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


TENSORS: dict[str, Callable[[Any, Tensor], Any]] = {
    "changes requires_grad of parameter layer.weight": lambda m, x: m.layer.requires_grad_(False),
    "changes requires_grad of buffer shift": lambda m, x: m.shift.requires_grad_(True),
    "registers a hook on parameter layer.weight": lambda m, x: m.layer.weight.register_hook(lambda grad: grad * 2),
    "registers a hook on parameter layer.bias": lambda m, x: m.layer.bias.register_post_accumulate_grad_hook(print),
}


@pytest.mark.parametrize("what", TENSORS)
@pytest.mark.parametrize("asks", [False, True])
def test_flags_and_hooks_are_refused(what: str, asks: bool) -> None:
    """If forward asks for values, it has run on the real tensors."""

    def does(module: Any, x: Tensor) -> None:
        if not asks or bool(x.sum() < 100):
            TENSORS[what](module, x)

    net, x = Net(does), X.clone()
    with pytest.raises(CaptureError, match=f"forward {what}, but no captured step does so; do it outside"):
        memgraph.compile(net, ROOM)(x)
    assert [p.requires_grad for p in net.parameters()] == [True, True]
    assert not net.shift.requires_grad and not x.requires_grad


class Energy(nn.Module):
    """An energy of positions, and forces, as networks for molecules give them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.forces = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), True

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.forces:
            positions.requires_grad_(True)
        energy = self.net(positions).sum()
        if not self.forces:
            return energy, positions.detach()
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -gradient


@pytest.mark.filterwarnings("ignore:a loss was made of outputs for which no backward was planned")
def test_an_argument_that_forward_lets_require_a_gradient_has_one() -> None:
    plain, ours = Energy(), Energy()
    model = memgraph.compile(ours, ROOM)
    captures = []
    for step in range(5):
        plain.forces = ours.forces = step != 3
        found = []
        for called, net in ((plain, plain), (model, ours)):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            net.zero_grad()
            energy, forces = called(x)
            (energy.square() + forces.square().sum()).backward()
            found.append([energy, forces, x.grad, x.requires_grad, *(p.grad for p in net.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        captures.append(len(model.plans))
    assert captures == [1, 2, 2, 3, 3]  # the first is for the energy alone; the third without forces


def test_a_schedule_that_freezes_is_refused_when_its_time_has_come() -> None:
    def does(module: Any, x: Tensor) -> None:
        if module.epoch == 1:
            module.layer.requires_grad_(False)

    net: Any = Net(does)
    net.epoch = 0
    model = memgraph.compile(net, ROOM)
    model(X).backward()
    net.epoch = 1
    with pytest.raises(CaptureError, match=r"requires_grad of parameter layer\.weight"):
        model(X)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("call", ["step", "zero_grad"])
def test_what_an_optimizer_does_in_forward_is_refused(call: str, cls: type[Any]) -> None:
    net = Net(lambda m, x: getattr(m.held[0], call)())
    net.held.append(cls(net.parameters(), lr=0.1))
    before = net.layer.weight.detach().clone()
    with pytest.raises(CaptureError, match=rf"forward calls {call}\(\) of an optimizer, but no captured step"):
        memgraph.compile(net, ROOM)(X)
    assert torch.equal(net.layer.weight, before)
    net.held[0].zero_grad()  # afterwards it works


def test_a_gradient_that_forward_takes_away_is_refused() -> None:
    def does(module: Any, x: Tensor) -> None:
        module.layer.weight.grad = None

    net = Net(does)
    net(X).backward()
    kept = net.layer.weight.grad
    with pytest.raises(CaptureError, match=r"sets the \.grad of parameter layer\.weight"):
        memgraph.compile(net, ROOM)(X)
    assert net.layer.weight.grad is kept


def first_call(read: Callable[[], int], write: Callable[[], object]) -> Callable[[Any, Tensor], Any]:
    def does(module: Any, x: Tensor) -> None:
        module.held[:] = [read()]
        write()

    return does


@pytest.fixture
def untouched() -> Iterator[None]:
    yield
    os.environ.pop("A_VARIABLE_OF_EFFECTS", None)
    VARIABLE.set(0)
    vars(LOCAL).clear()


ELSEWHERE: dict[str, tuple[Callable[[], int], Callable[[], object]]] = {
    r"os\.environ": (
        lambda: int(os.environ.get("A_VARIABLE_OF_EFFECTS", "0")),
        lambda: os.environ.update(A_VARIABLE_OF_EFFECTS="1"),
    ),
    "VARIABLE": (lambda: VARIABLE.get(), lambda: VARIABLE.set(1)),
    "LOCAL": (lambda: getattr(LOCAL, "warm", 0), lambda: setattr(LOCAL, "warm", 1)),
}


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_the_next_call_would_read_is_refused(name: str) -> None:
    read, write = ELSEWHERE[name]

    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            factor = 10 if read() else 1
            write()
            return self.layer(x).mean() * factor

    with pytest.raises(CaptureError, match=f"forward changes .*{name}"):
        memgraph.compile(Scaled(lambda m, x: None), ROOM)(X)


CONTEXT: dict[str, object] = {}
LISTED: list[int] = []


def set_environ(net: Any, x: Tensor) -> None:
    os.environ["A_VARIABLE_OF_EFFECTS"] = str(len(x))


PER_KIND: dict[str, Callable[[Any, Tensor], Any]] = {
    r"CONTEXT\['n'\]": lambda m, x: CONTEXT.update(n=len(x)),
    r"Net\.width": lambda m, x: setattr(Net, "width", len(x)),
    "LISTED": lambda m, x: LISTED.__setitem__(slice(None), [len(x)]),
    "VARIABLE": lambda m, x: VARIABLE.set(len(x)),
    "LOCAL": lambda m, x: setattr(LOCAL, "width", len(x)),
    "environ": set_environ,
}


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", PER_KIND)
def test_what_each_kind_of_call_sets_otherwise_is_refused(name: str) -> None:
    """A later call of the first kind would leave the value of the second."""
    CONTEXT["n"], LISTED[:] = 0, [0]
    Net.width = 0
    LOCAL.width, os.environ["A_VARIABLE_OF_EFFECTS"] = 0, "0"
    model = memgraph.compile(Net(PER_KIND[name]), ROOM)
    model(X)
    model(X)
    with pytest.raises(
        CaptureError, match=f"forward sets .*{name}.*, and it had another value before, in several kinds of calls"
    ):
        model(torch.cat([X, X]))


def test_a_buffer_that_a_hook_assigns_is_refused() -> None:
    class Hooked(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)

            def hook(gradient: Tensor) -> Tensor:
                self.shift = self.shift * 0.5
                return gradient

            y.register_hook(hook)
            return y.sum()

    with pytest.raises(CaptureError, match="a hook, or a function's backward, assigns to buffer shift"):
        memgraph.compile(Hooked(lambda m, x: None), ROOM)(X)


@pytest.mark.parametrize("call", ["retain_grad", "detach_"])
def test_what_forward_does_to_a_given_tensor_is_refused(call: str) -> None:
    leaf = torch.ones(2, 4, requires_grad=True)
    x = leaf * 2 if call == "retain_grad" else leaf
    with pytest.raises(CaptureError, match=r"retain_grad\(\) on input 0|requires_grad of input 0"):
        memgraph.compile(Net(lambda m, x: getattr(x, call)()), ROOM)(x)


def test_a_count_that_is_written_elsewhere_too_is_counted_there() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.calls = self.seen = 0
            self.pair: tuple[int, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen, self.pair = 2 * self.calls, (self.calls, 0)
            return super().forward(x)

    for _ in range(2):
        net = Counting()
        model = memgraph.compile(net, ROOM)
        for step in range(1, 4):
            model(X).sum().backward()
            assert (net.calls, net.seen, net.pair) == (step, 2 * step, (step, 0))
            assert type(net.seen) is int


class Kept(nn.Module):
    """Keeps a float where it outlives the call."""

    def __init__(self, keep: Callable[[Any, float], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.beta, self.keep, self.kept = nn.Linear(4, 4), 0.0, keep, None

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, self.beta)
        return self.layer(x).sum() * self.beta


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    "keep",
    [
        lambda m, beta: setattr(m, "kept", lambda: beta),
        lambda m, beta: exec("w = beta * 2", {"beta": beta}),
    ],
)
def test_a_number_that_outlives_a_trace_is_that_number(keep: Callable[[Any, float], Any]) -> None:
    plain, net = Kept(keep), Kept(keep)
    model = memgraph.compile(net, ROOM)
    for step in range(4):
        plain.beta = net.beta = step * 0.1
        losses = [called(X) for called in (model, plain)]
        assert torch.equal(*losses)
        kept = net.kept() if net.kept is not None else net.beta
        assert kept == net.beta and repr(kept + 1) == repr(net.beta + 1)


@pytest.mark.usefixtures("untouched")
def test_a_number_that_is_kept_outside_of_the_module_is_refused_where_it_differs() -> None:
    net = Kept(lambda m, beta: setattr(LOCAL, "beta", beta))
    model = memgraph.compile(net, ROOM)
    for beta in (0.0, 0.1):
        net.beta = beta
        model(X)
        assert LOCAL.beta == beta
    net.beta = 0.2
    with pytest.raises(CaptureError, match=r"forward sets .*LOCAL\['beta'\], and it had another value before"):
        model(X)


def test_a_partial_method_that_is_changed() -> None:
    class Scaling(Net):
        def scaled(self, x: Tensor, factor: float) -> Tensor:
            return x * factor

        twice = partialmethod(scaled, factor=2.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.twice(self.layer(x)).sum()

    net = Scaling(lambda m, x: None)
    model = memgraph.compile(net, ROOM)
    assert torch.equal(model(X), net(X))
    vars(Scaling)["twice"].keywords["factor"] = 7.0
    assert torch.equal(model(X), net(X))


@pytest.mark.parametrize(
    "does",
    [lambda m, x: x.t_(), lambda m, x: x.unsqueeze_(0), lambda m, x: x.resize_(2, 2), lambda m, x: m.square.t_()],
    ids=["t_", "unsqueeze_", "resize_", "a buffer"],
)
def test_another_layout_in_place_is_refused(does: Callable[[Any, Tensor], Any]) -> None:
    """The caller's tensor would keep its own, without a word where the sizes are equal."""
    net = Net(does)
    net.register_buffer("square", torch.zeros(4, 4))
    with pytest.raises(CaptureError, match=r"forward changes the shape or the strides of (input 0|buffer square) in"):
        memgraph.compile(net, ROOM)(torch.ones(4, 4))


def test_a_layout_that_is_put_back_is_allowed() -> None:
    net = Net(lambda m, x: (x.t_(), x.t_()))
    assert torch.equal(memgraph.compile(net, ROOM)(X), net(X))


class Packs(nn.Module):
    """Keeps what backward reads as `hooks` make it."""

    def __init__(self, hooks: Callable[[], Any]) -> None:
        super().__init__()
        self.hooks, self.body = hooks, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.hooks():
            out: torch.Tensor = self.body(torch.nn.functional.gelu(self.body(x)))
        return out


def rounded() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.float())


def test_hooks_for_saved_tensors_in_forward_are_refused_but_torchs_own() -> None:
    with pytest.raises(memgraph.CaptureError, match="forward enters saved_tensors_hooks"):
        memgraph.compile(Packs(rounded), ROOM)(torch.randn(2, 8))
    on_cpu = Packs(torch.autograd.graph.save_on_cpu)
    plain, x = copy.deepcopy(on_cpu), torch.randn(2, 8)
    for each in (memgraph.compile(on_cpu, ROOM), plain):
        each(x).sum().backward()
    ours, theirs = (each.body.weight.grad for each in (on_cpu, plain))
    assert ours is not None and theirs is not None and torch.equal(ours, theirs)


def test_parametrizations_that_are_cached_around_a_call_are_refused() -> None:
    parametrize = torch.nn.utils.parametrize
    module = nn.Linear(4, 4)
    parametrize.register_parametrization(module, "weight", nn.Tanh())
    model = memgraph.compile(module, ROOM)
    with parametrize.cached(), pytest.raises(memgraph.MemgraphError, match=r"parametrize.cached\(\) keeps"):
        model(torch.randn(2, 4))
    model(torch.randn(2, 4)).sum().backward()
