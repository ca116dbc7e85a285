"""An optimizer's update in windows over the disk is bit-equal to the plain one, whatever is offloaded."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memgraph.errors import UpdateError
from memgraph.optim.windowed_optimizer import WindowedOptimizer
from tests.support.windowed_training import (
    ALL,
    LOW_PRECISION,
    NOT,
    OPTIMIZERS,
    SIDES,
    SMALL,
    Make,
    Training,
    assert_equal,
    far_of,
    made,
    training,
)

# --- equal


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("side", ["all", "what is large", "states"])
def test_an_update_in_windows_is_the_plain_one(tmp_path: Path, name: str, side: str) -> None:
    plain = training(tmp_path, OPTIMIZERS[name], None).steps()
    windows = training(tmp_path, OPTIMIZERS[name], SIDES[side]).steps()
    assert_equal(windows, plain)


@pytest.mark.long
@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "AdamW fused", "ASGD"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("nbytes", [100_000, 333_333, 1 << 30])
def test_what_is_offloaded_and_how_large_the_windows_are_makes_no_difference(
    tmp_path: Path, name: str, side: str, nbytes: int
) -> None:
    plain = training(tmp_path, OPTIMIZERS[name], None).steps(3)
    windows = training(tmp_path, OPTIMIZERS[name], SIDES[side], nbytes).steps(3)
    assert_equal(windows, plain)


def test_states_are_where_they_were_wanted(tmp_path: Path) -> None:
    make = OPTIMIZERS["AdamW"]
    assert far_of(training(tmp_path, make, SIDES["states"]).steps(1)) == {0, 2}
    assert far_of(training(tmp_path, make, SIDES["parameters"]).steps(1)) == {0, 1}
    assert 4 in far_of(training(tmp_path, make, ALL).steps(1))


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", LOW_PRECISION)
def test_low_precision_is_equal_where_each_parameter_fits_a_window(tmp_path: Path, name: str, threads: int) -> None:
    pair = low_precision(tmp_path, OPTIMIZERS[name], threads, 40_001, 3 << 20)
    assert_equal(*pair)


@pytest.mark.long
@pytest.mark.parametrize("name", LOW_PRECISION)
def test_low_precision_is_what_a_single_thread_gives_where_it_is_cut(tmp_path: Path, name: str) -> None:
    _, plain = low_precision(tmp_path, OPTIMIZERS[name], 1, 130_001, 3 << 20)
    for threads in (1, 3):
        windows, _ = low_precision(tmp_path, OPTIMIZERS[name], threads, 130_001, 500_000)
        assert_equal(windows, plain)


def low_precision(folder: Path, make: Make, threads: int, count: int, nbytes: int) -> tuple[Training, Training]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        both = []
        for far in (ALL, None):
            generator = torch.Generator().manual_seed(7)
            tensors = [torch.randn(count, generator=generator) for _ in range(3)]
            parameters = [
                nn.Parameter(t.to(d))
                for t, d in zip(tensors, [torch.bfloat16, torch.float32, torch.bfloat16], strict=True)
            ]
            one = Training(parameters, make(parameters), far or NOT, folder)
            if far:
                for parameter in parameters:
                    parameter.data = one.at_home(parameter.data, True)
                one.windowed = WindowedOptimizer(one.optimizer, nbytes, far.states, folder)
            both.append(one.steps(4))
        return both[0], both[1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "AdamW foreach", "RMSprop centered"])
def test_gradients_of_other_strides_than_their_parameter_are_right(tmp_path: Path, name: str) -> None:
    both = []
    for far in (ALL, SIDES["states"], None):
        one = training(tmp_path, OPTIMIZERS[name], far)
        for _ in range(4):
            one.gradients()
            for parameter in one.parameters:
                if parameter.grad is not None and parameter.dim() == 2:
                    other = parameter.grad.t().clone(memory_format=torch.contiguous_format).t()
                    parameter.grad = one.at_home(other, one.far.gradients(parameter))
            one.optimizer.step()
        both.append(one)
    for one in both[:2]:
        assert_equal(one, both[-1], strides=False)


def test_a_parameter_that_leaves_gaps_in_memory_is_right(tmp_path: Path) -> None:
    both = []
    for far in (ALL, None):
        one = training(tmp_path, OPTIMIZERS["AdamW"], far)
        with torch.no_grad():
            one.parameters[0].data = torch.arange(70 * 600.0).view(70, 600)[:, ::2]
        both.append(one.steps(3))
    assert_equal(both[0], both[1], strides=False)


@pytest.mark.parametrize("side", SIDES)
def test_groups_keep_their_own_options(tmp_path: Path, side: str) -> None:
    def make(parameters: Sequence[nn.Parameter]) -> optim.Optimizer:
        first = {"params": parameters[::2], "lr": 0.5, "momentum": 0.0}
        return optim.SGD([first, {"params": parameters[1::2], "nesterov": True, "foreach": True}], lr=0.1, momentum=0.9)

    plain, windows = (training(tmp_path, make, far).steps() for far in (None, SIDES[side]))
    assert_equal(windows, plain)


def test_a_default_device_and_inference_mode_do_no_harm(tmp_path: Path) -> None:
    both = []
    for far in (ALL, None):
        one = training(tmp_path, OPTIMIZERS["AdamW foreach"], far)
        for _ in range(3):
            one.gradients()
            with torch.device("meta" if far else "cpu"), torch.inference_mode(bool(far)):
                one.optimizer.step()
        both.append(one)
    assert_equal(both[0], both[1])


def test_an_option_may_change_between_steps(tmp_path: Path) -> None:
    both = []
    for far in (ALL, None):
        one = training(tmp_path, OPTIMIZERS["SGD"], far).steps(2)
        one.optimizer.param_groups[0].update(momentum=0.9, weight_decay=0.3)
        both.append(one.steps(3))
    assert_equal(both[0], both[1])


SCHEDULERS: dict[str, Callable[[optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
}


@pytest.mark.long
@pytest.mark.parametrize("before", [True, False], ids=["built before", "built after"])
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("name", ["SGD momentum", "SGD lr tensor"])
def test_schedulers_do_what_they_do(tmp_path: Path, schedule: str, name: str, before: bool) -> None:
    both = []
    for far in (ALL, None):
        plain = training(tmp_path, OPTIMIZERS[name], None)
        plain.far = far or NOT
        scheduler = SCHEDULERS[schedule](plain.optimizer) if before else None
        if far:
            plain.windowed = WindowedOptimizer(plain.optimizer, SMALL, far.states, tmp_path)
        scheduler = scheduler or SCHEDULERS[schedule](plain.optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(5):
                plain.steps(1)
                scheduler.step()
        both.append(plain)
    assert_equal(both[0], both[1])


def test_a_gradient_scaler_unscales_and_skips_as_ever(tmp_path: Path) -> None:
    both = []
    for far in (ALL, None):
        one = training(tmp_path, OPTIMIZERS["AdamW fused"], far)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        scaler.scale(torch.ones(()))
        for i in range(5):
            one.gradients()
            if i in (0, 3):
                assert one.parameters[1].grad is not None
                one.parameters[1].grad[12_345] = torch.inf
            scaler.step(one.optimizer)
            scaler.update()
        both.append(one)
    assert_equal(both[0], both[1])


# --- what is around a step


def test_a_closure_is_called_once_and_first(tmp_path: Path) -> None:
    one, plain = training(tmp_path, OPTIMIZERS["AdamW"], ALL), training(tmp_path, OPTIMIZERS["AdamW"], None)
    for side in (one, plain):
        calls: list[bool] = []

        def closure(side: Training = side, calls: list[bool] = calls) -> float:
            calls.append(torch.is_grad_enabled())
            side.gradients()
            return 3.5

        with torch.no_grad():
            assert side.optimizer.step(closure) == 3.5
            assert side.optimizer.step(closure=closure) == 3.5
        assert calls == [True, True]
    assert_equal(one, plain)


def test_hooks_are_called_once(tmp_path: Path) -> None:
    one, calls = training(tmp_path, OPTIMIZERS["AdamW"], ALL), []
    one.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(("pre", optimizer, args, kwargs)))
    one.optimizer.register_step_post_hook(lambda *where: calls.append(("post", *where)))
    everywhere = [
        register_optimizer_step_pre_hook(lambda *where: calls.append(("all pre", *where))),
        register_optimizer_step_post_hook(lambda *where: calls.append(("all post", *where))),
    ]
    one.steps(1)
    for handle in everywhere:
        handle.remove()
    assert [name for name, *_ in calls] == ["all pre", "pre", "post", "all post"]
    assert all(optimizer is one.optimizer and kwargs == {} for _, optimizer, _, kwargs in calls)


def test_writing_by_the_file_is_seen_as_a_change_of_the_parameter(tmp_path: Path) -> None:
    one = training(tmp_path, OPTIMIZERS["AdamW"], ALL)
    before = [parameter._version for parameter in one.parameters]
    one.steps(1)
    assert [p._version > v for p, v in zip(one.parameters, before, strict=True)][:2] == [True, True]


def test_where_nothing_is_offloaded_the_plain_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memgraph.optim.windowed_optimizer.WindowedUpdate", None)
    one = training(tmp_path, OPTIMIZERS["AdamW"], NOT).steps()
    assert_equal(one, training(tmp_path, OPTIMIZERS["AdamW"], None).steps())


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_the_optimizer_is_plain(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    one = training(tmp_path, OPTIMIZERS["AdamW"], ALL).steps(2)
    parameters, optimizer = way((one.parameters, one.optimizer))
    assert "step" not in vars(optimizer)
    again = Training(parameters, optimizer, NOT, tmp_path, done=one.done).steps(2)
    assert far_of(again) == {0}
    plain = training(tmp_path, OPTIMIZERS["AdamW"], None).steps(4)
    assert_equal(again, plain)
    assert_equal(one.steps(2), plain)


@pytest.mark.parametrize("side", ["all", "states", "parameters"])
def test_state_dicts_are_the_plain_ones_and_load_at_any_time(tmp_path: Path, side: str) -> None:
    plain = training(tmp_path, OPTIMIZERS["AdamW amsgrad"], None).steps(3)
    one = training(tmp_path, OPTIMIZERS["AdamW amsgrad"], SIDES[side])
    for p, q in zip(one.parameters, plain.parameters, strict=True):
        p.data.copy_(q.data)
    one.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    one.done = plain.done
    assert_equal(one.steps(2), plain.steps(2))
    one.optimizer.load_state_dict(one.optimizer.state_dict())
    assert_equal(one.steps(2), plain.steps(2))
    assert max(far_of(one)) == {"all": 5, "states": 3, "parameters": 1}[side]
    fresh = training(tmp_path, OPTIMIZERS["AdamW amsgrad"], None)
    fresh.optimizer.load_state_dict(one.optimizer.state_dict())
    fresh.done = plain.done
    for p, q in zip(fresh.parameters, one.parameters, strict=True):
        p.data.copy_(q.data)
    assert_equal(fresh.steps(1), plain.steps(1))


# --- refused


class Own(optim.AdamW):
    pass


@pytest.mark.parametrize("kind", [Own, optim.Adafactor, optim.LBFGS])
def test_an_optimizer_that_is_not_known_is_refused(tmp_path: Path, kind: type[optim.Optimizer]) -> None:
    one = training(tmp_path, made(kind), ALL)
    one.gradients()
    before = [p.detach().clone() for p in one.parameters]
    with pytest.raises(
        UpdateError, match=r"is not known to update each element independently, .*: give it to memgraph"
    ):
        one.optimizer.step(lambda: 0.0)
    assert all(map(torch.equal, before, one.parameters))


@pytest.mark.parametrize("option", ["differentiable", "capturable"])
def test_options_that_windows_do_not_keep_are_refused(tmp_path: Path, option: str) -> None:
    one = training(tmp_path, made(optim.Adam, **{option: True}), ALL)
    one.gradients()
    with pytest.raises(UpdateError, match=f"Adam with {option}=True can't be run in windows; set {option}=False"):
        one.optimizer.step()


def test_sparse_gradients_are_refused_before_anything_changes(tmp_path: Path) -> None:
    one = training(tmp_path, OPTIMIZERS["SGD"], ALL)
    one.gradients()
    one.parameters[5].grad = torch.zeros(33, 1000).to_sparse()
    before = [p.detach().clone() for p in one.parameters]
    with pytest.raises(UpdateError, match=r"takes dense gradients, and that of a parameter of shape \(33, 1000\) is"):
        one.optimizer.step()
    assert all(map(torch.equal, before, one.parameters))


def test_two_parameters_on_one_place_are_refused(tmp_path: Path) -> None:
    one = training(tmp_path, OPTIMIZERS["SGD"], ALL)
    one.parameters[7].data = one.parameters[1].data[:20_000]
    one.gradients()
    one.parameters[7].grad = torch.ones(20_000)
    with pytest.raises(UpdateError, match="shares its memory with another"):
        one.optimizer.step()


def test_what_torch_does_not_do_the_same_way_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UpdateError, match=r"SGD with fused=True is not deterministic in torch\.bfloat16"):
        low_precision(tmp_path, OPTIMIZERS["SGD fused"], 1, 70_001, 300_000)


def test_what_the_optimizer_refuses_by_itself_is_not_kept_for_later(tmp_path: Path) -> None:
    one = training(tmp_path, OPTIMIZERS["AdamW"], ALL).steps(1)
    one.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(KeyError, match="max_exp_avg_sq"):
        one.steps(1)
    one.optimizer.param_groups[0]["amsgrad"] = False
    one.done -= 1
    assert_equal(one.steps(2), training(tmp_path, OPTIMIZERS["AdamW"], None).steps(3))


def test_windows_that_hold_no_chunk_are_refused(tmp_path: Path) -> None:
    one = training(tmp_path, OPTIMIZERS["AdamW"], ALL, nbytes=10_000)
    one.gradients()
    with pytest.raises(ValueError, match="windows of 10000 bytes hold no chunk of a parameter that wants 16384"):
        one.optimizer.step()
