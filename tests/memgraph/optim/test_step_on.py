"""The user's own object steps on windows as it does on whole parameters, or is refused by name."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from memgraph.errors import UpdateError
from memgraph.optim.optimizer_profiler import update_nbytes
from memgraph.optim.update_unit import UpdateUnit, unit_of, unsupported_reason
from memgraph.optim.windowed_optimizer import WindowedOptimizer
from memgraph.storage.transfer import offload_tensors

WINDOW = 1 << 16
Make = Callable[[list[nn.Parameter]], optim.Optimizer]


class Pair:
    """Parameters in memory, and others on a disk, which are updated in windows."""

    def __init__(self, folder: Path, make: Make, dtype: torch.dtype = torch.float32) -> None:
        values = [torch.linspace(-1, 1, 200 * 180).view(200, 180).to(dtype), torch.linspace(0, 1, 90).to(dtype)]
        self.theirs = [nn.Parameter(value.clone()) for value in values]
        self.ours = [nn.Parameter(value) for value in offload_tensors(values, folder)]
        self.plain, self.optimizer = make(self.theirs), make(self.ours)
        whole = unit_of(self.optimizer) is UpdateUnit.PARAMETER
        self.windowed = WindowedOptimizer(self.optimizer, WINDOW, lambda p: p.numel() > 1000, folder, whole=whole)

    def gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for ours, theirs in zip(self.ours, self.theirs, strict=True):
            if ours.grad is None:
                ours.grad, theirs.grad = torch.zeros_like(ours), torch.zeros_like(theirs)
            gradient = torch.randn(theirs.shape, generator=generator).to(theirs.dtype)
            ours.grad += gradient
            theirs.grad += gradient  # type: ignore[operator]

    def train(self, steps: int = 4, zero: bool = True) -> list[Any]:
        found = []
        for seed in range(steps):
            self.gradients(seed)
            found += [self.optimizer.step(), self.plain.step()]
            assert all(map(torch.equal, self.ours, self.theirs))
            assert [p.shape for p in self.ours] == [p.shape for p in self.theirs]
            for optimizer in (self.optimizer, self.plain) if zero else ():
                optimizer.zero_grad()
        return found


class Momentum(optim.Optimizer):
    pointwise = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.log: deque[int] = deque()

    @torch.no_grad()
    def step(self, closure: Any = None, **options: Any) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group, self.state[parameter])

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(parameter))
        assert parameter.grad is not None
        mean.mul_(0.9).add_(parameter.grad)
        parameter.sub_(mean, alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [optim.AdamW, functools.partial(optim.SGD, momentum=0.9)])
def test_several_chunks_of_a_parameter_in_one_window(tmp_path: Path, dtype: torch.dtype, kind: Any) -> None:
    """In low precision a chunk has few elements, and gives what one thread gives on the whole."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        Pair(tmp_path, lambda params: kind(params, lr=0.01), dtype).train()
    finally:
        torch.set_num_threads(threads)


class ByData(Momentum):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        assert parameter.grad is not None
        parameter.data = parameter.data - group["lr"] * parameter.grad


class BySet(Momentum):
    pointwise = True

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        assert parameter.grad is not None
        parameter.set_(parameter.detach() - group["lr"] * parameter.grad)


class Zeroing(Momentum):
    def step(self, closure: Any = None, **options: Any) -> Any:
        super().step()
        self.zero_grad()
        return 5


class Counting(Momentum):
    """Counts in lists and in tensors of the state: once a step, however many windows there are."""

    pointwise = True

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state.setdefault("calls", [0])[0] += 1
        state.setdefault("count", torch.zeros(1)).add_(1)
        group = {"lr": group["lr"] / state["calls"][0] / float(state["count"])}
        super().update(parameter, group, state)


@pytest.mark.parametrize("kind", [ByData, BySet, Counting])
def test_however_a_step_writes(tmp_path: Path, kind: Any) -> None:
    Pair(tmp_path, kind).train()


def test_a_step_may_take_the_gradients_away_and_return_something(tmp_path: Path) -> None:
    assert Pair(tmp_path, Zeroing).train(zero=False) == [5] * 8


class Skipping(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return super().step() if all(bool(grad.isfinite().all()) for grad in grads) else None


class Coasting(Momentum):
    def step(self, closure: Any = None, **options: Any) -> Any:
        super().step()
        for parameter, state in self.state.items():
            if parameter.grad is None:
                parameter.data.sub_(state["mean"], alpha=0.01)


class Logging(Momentum):
    pointwise = True

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.log.append(1)
        super().update(parameter, {"lr": group["lr"] / len(self.log)}, state)


class Tallying(Momentum):
    pointwise = True
    tally = 0

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        type(self).tally += 1
        super().update(parameter, {"lr": group["lr"] / self.tally}, state)


class Ordered(Momentum):
    pointwise = True

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        is_first = parameter is self.param_groups[0]["params"][0]
        super().update(parameter, {"lr": group["lr"] * (1 if is_first else 2)}, state)


class Counted(Momentum):
    """A rule by the number of all gradients, which only a trial with as many parameters shows."""

    def step(self, closure: Any = None, **options: Any) -> Any:
        count = sum(p.grad is not None for p in self.param_groups[0]["params"])
        self.rate = 1.0 if count < 3 else 0.5
        super().step()

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(parameter, {"lr": group["lr"] * self.rate}, state)


@pytest.mark.parametrize("kind", [Skipping, Coasting, Logging, Tallying, Ordered, Counted])
def test_a_step_that_is_another_in_parts_is_found_by_a_trial(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.ones(20, 30)), nn.Parameter(torch.ones(30, 20)), nn.Parameter(torch.ones(9))])
    assert unit_of(optimizer) is UpdateUnit.ALL
    assert not optimizer.state and Tallying.tally == 0


class Raising(Momentum):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        assert parameter.grad is not None
        if not parameter.grad.isfinite().all():
            raise FloatingPointError("no number")
        super().update(parameter, group, state)


def test_an_optimizer_that_raises_at_what_is_no_number_is_cut() -> None:
    assert unit_of(Raising([nn.Parameter(torch.ones(20, 30)), nn.Parameter(torch.ones(9))])) is UpdateUnit.PARAMETER


def test_a_step_that_was_replaced_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def anyone(parameter: Tensor) -> bool:
        return True

    optimizer: Any = optim.AdamW([nn.Parameter(torch.ones(20, 30)), nn.Parameter(torch.ones(9))])
    step = optimizer.step
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert unsupported_reason(optimizer, anyone) is None  # a scheduler wraps it, too
    optimizer.step = lambda: step()
    assert "was replaced on the object" in str(unsupported_reason(optimizer, anyone))

    plain: Any = optim.AdamW.step

    def clipping(self: optim.Optimizer, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e-3)
        return plain(self)

    monkeypatch.setattr(optim.AdamW, "step", clipping)
    other = optim.AdamW([nn.Parameter(torch.ones(20, 30)), nn.Parameter(torch.ones(9))])
    assert unit_of(other) is UpdateUnit.ALL


def test_an_option_that_a_step_changes_later_is_an_error(tmp_path: Path) -> None:
    class Halving(Momentum):
        pointwise = True

        def step(self, closure: Any = None, **options: Any) -> Any:
            super().step()
            for group in self.param_groups:
                if any(float(self.state[p]["mean"].abs().max()) > 8 for p in group["params"]):
                    group["lr"] *= 0.5

    pair = Pair(tmp_path, Halving)
    for parameter in pair.ours:
        parameter.grad = torch.full_like(parameter, 20.0)
    with pytest.raises(
        UpdateError, match=r"Halving changes the option 'lr' of a group in a step.*load an earlier state"
    ):
        pair.optimizer.step()


def test_a_state_that_a_later_step_makes_is_an_error(tmp_path: Path) -> None:
    class Late(Momentum):
        pointwise = True

        def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            super().update(parameter, group, state)
            if state.setdefault("calls", [0])[0] > 8:
                state.setdefault("average", torch.zeros_like(parameter))
            state["calls"][0] += 1

    pair = Pair(tmp_path, Late)
    with pytest.raises(UpdateError, match="Late makes the state 'average' in a later step than its first"):
        pair.train(12)


def test_hooks_that_would_run_for_each_window_are_refused(tmp_path: Path) -> None:
    class Derived(optim.AdamW):
        pointwise = True

        def step(self, closure: Any = None) -> Any:
            return super().step()

    optim.AdamW([nn.Parameter(torch.ones(2))])  # from now on torch runs hooks in the step of AdamW
    pair = Pair(tmp_path, Derived)
    pair.train()
    pair.optimizer.register_step_post_hook(lambda *_: None)
    pair.gradients(0)
    with pytest.raises(UpdateError, match=r"Derived calls the step of Adam.*, in which torch runs the hooks"):
        pair.optimizer.step()


def test_arguments_beside_a_closure_are_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Momentum)
    pair.gradients(0)
    with pytest.raises(UpdateError, match=r"Momentum.step\(\) in windows takes a closure and nothing else, not lr"):
        pair.optimizer.step(lr=0.1)  # type: ignore[call-overload]


def test_an_error_of_the_optimizer_leaves_what_it_has_done_and_the_next_step_is_one(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Raising)
    pair.train(1)
    pair.gradients(1)
    for parameters, optimizer in ((pair.ours, pair.optimizer), (pair.theirs, pair.plain)):
        parameters[1].grad = torch.full_like(parameters[1], torch.inf)
        with pytest.raises(FloatingPointError, match="no number"):
            optimizer.step()
        optimizer.zero_grad()
    pair.train()


def test_trials_draw_no_numbers() -> None:
    class Noisy(Momentum):
        def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            super().update(parameter, group, state)
            parameter.add_(torch.randn_like(parameter))

    optimizer = Noisy([nn.Parameter(torch.ones(200, 300)), nn.Parameter(torch.ones(9))])
    before = torch.get_rng_state()
    unit_of(optimizer)
    update_nbytes(optimizer)
    assert torch.equal(torch.get_rng_state(), before)


def test_two_threads_step_one_after_the_other(tmp_path: Path) -> None:
    pair = Pair(tmp_path, lambda params: optim.AdamW(params, lr=0.01))
    pair.gradients(0)
    threads = [threading.Thread(target=pair.optimizer.step) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(2):
        pair.plain.step()
    assert all(map(torch.equal, pair.ours, pair.theirs))
