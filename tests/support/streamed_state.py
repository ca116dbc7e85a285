"""Small nets whose state is large enough to offload, and a comparison with eager after every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import memgraph
from memgraph.optim import offloaded_update
from memgraph.storage.mapped_storage import is_offloaded
from passes import Stream
from tests.support.smallest_budget import smallest_of

Make = Callable[[], nn.Module]
Optimizer = Callable[[Any], torch.optim.Optimizer]
WIDTH, ROWS, STEPS = 256, 8, 5
SLACK = 1.05  # over the smallest budget, which changes with measured prices
TINY = 1 << 20  # a budget that is too small for every step


def chain(layers: int = 6, *more: Make) -> nn.Module:
    """Return linear layers of 262 kB, each with an activation and the modules of `more`."""
    torch.manual_seed(0)
    kinds: tuple[Make, ...] = (lambda: nn.Linear(WIDTH, WIDTH), nn.GELU, *more)
    return nn.Sequential(*(kind() for _ in range(layers) for kind in kinds))


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2),
    "sgd": partial(torch.optim.SGD, lr=1e-2),
}
ADAMW = OPTIMIZERS["adamw"]


def tightest(make: Make = chain, kind: str | None = "adamw", grad: bool = True) -> int:
    """Return about the smallest budget for the current window size; `grad` False is without backward."""
    return _tightest(make, kind, grad, offloaded_update.SMALLEST)


@cache
def _tightest(make: Make, kind: str | None, grad: bool, _window: int) -> int:
    model = make()
    optimizer = OPTIMIZERS[kind](model.parameters()) if kind else None
    wishes: dict[str, Any] = {"budget": TINY, "optimizer": optimizer, "loss": loss, "time_limit": 0}
    with torch.set_grad_enabled(grad):
        return int(smallest_of(lambda: memgraph.plan(model, batch(), **wishes)) * SLACK)


def least(kind: str = "adamw", make: Make = chain, **wishes: Any) -> int:
    """Return a little more than the smallest budget, without caching it."""
    model = make()
    optimizer = OPTIMIZERS[kind](model.parameters())
    wishes |= {"budget": 1, "optimizer": optimizer, "loss": loss, "time_limit": 0}
    return int(smallest_of(lambda: memgraph.plan(model, batch(), **wishes)) * SLACK)


def streamed(model: nn.Module, budget: int, **wishes: Any) -> memgraph.CompiledModule:
    all_wishes: dict[str, Any] = {"loss": loss, "time_limit": 0} | wishes
    return memgraph.compile(model, budget, **all_wishes)


def streams(model: memgraph.CompiledModule) -> set[str]:
    """Return the values that the latest plan streams."""
    return {decision.value for decision in model.plan.plan if isinstance(decision, Stream)}


def assert_kept(model: memgraph.CompiledModule, budget: int) -> None:
    """Check measured <= forecast <= budget for the latest step."""
    report = model.plan
    assert report.measured is None or report.measured <= report.peak
    assert report.peak <= budget


def far(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> set[str]:
    """Return the kinds of state that are on disk now."""
    parameters = list(model.parameters())
    held: dict[str, list[Tensor | None]] = {
        "parameter": [p.detach() for p in parameters],
        "gradient": [p.grad for p in parameters],
    }
    states = optimizer.state.values() if optimizer is not None else ()
    held["state"] = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return {kind for kind, tensors in held.items() if any(t is not None and is_offloaded(t) for t in tensors)}


def facts(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor | None]:
    """Return all tensors that must be equal after a step."""
    parameters = list(model.parameters())
    found: list[Tensor | None] = [*parameters, *model.buffers(), *(p.grad for p in parameters)]
    if optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                found += [torch.as_tensor(state[key]) for key in sorted(state) if state[key] is not None]
    return [None if tensor is None else tensor.detach().clone() for tensor in found]


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    return len(ours) == len(theirs) and all(
        a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )


class Twins:
    """An eager model with its optimizer, and a clone of both that is streamed under a budget."""

    def __init__(
        self, make: Make = chain, kind: str | None = "adamw", *, budget: int | None = None, optimizer: Any = None,
        given: bool = True, after: bool = False, **wishes: Any,
    ) -> None:  # fmt: skip
        """Make both models.

        Args:
            optimizer: makes an optimizer of a model; None for `kind` with all parameters.
            given: pass the optimizer to compile.
            after: make it after compile.
        """
        model = make()
        self.plain = copy.deepcopy(model)
        made: Any = optimizer or (lambda model: OPTIMIZERS[kind](model.parameters()) if kind else None)
        self.theirs: Any = made(self.plain)
        self.budget = budget or tightest(make, kind if given and optimizer is None else "adamw" if given else None)
        its = None if after else made(model)
        self.model = streamed(model, self.budget, optimizer=its if given else None, **wishes)
        self.ours: Any = made(self.model) if after else its
        self.module = model

    def each(self, do: Callable[[nn.Module, Any, Callable[[nn.Module, Tensor], Tensor]], Any]) -> tuple[Any, Any]:
        """Call `do` with both models, from one seed; its last argument calls the model and returns the loss."""
        found = []
        for model, optimizer in ((self.plain, self.theirs), (self.model, self.ours)):
            torch.manual_seed(7)
            run = (lambda model, x: model(x)) if model is self.model else (lambda model, x: loss(model(x)))
            found.append(do(model, optimizer, run))
        return found[0], found[1]

    def step(self, do: Any = None, seed: int = 1) -> None:
        """Run a step of both, and compare them."""
        theirs, ours = self.each(do or partial(train, x=batch(seed)))
        assert same([ours], [theirs])
        self.assert_same()
        assert_kept(self.model, self.budget)

    def turns(self, do: Any, count: int) -> None:
        """Call `do` several times with both, and compare them each time."""
        for _ in range(count):
            theirs, ours = self.each(do)
            assert torch.equal(theirs, ours)
            self.assert_same()
        assert streams(self.model)

    def train_plain(self, steps: int) -> None:
        """Train only the eager model."""
        for seed in range(steps):
            train(self.plain, self.theirs, lambda model, x: loss(model(x)), batch(seed))

    def assert_same(self) -> None:
        assert same(facts(self.model, self.ours), facts(self.plain, self.theirs))

    def train(self, steps: int = STEPS, do: Any = None) -> None:
        for seed in range(steps):
            self.step(do, seed)
        assert self.model.plan.measured is not None
        assert streams(self.model)
        assert far(self.module, self.ours)


def train(model: nn.Module, optimizer: Any, run: Any, x: Tensor) -> Tensor:
    """Run a step that leaves its gradients, so that they can be compared."""
    optimizer.zero_grad()
    made = run(model, x)
    made.backward()
    optimizer.step()
    return made.detach()
