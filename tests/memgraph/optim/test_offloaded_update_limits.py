"""Inference, large models, several models in one process, disk faults, and cleanup."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile.link_bandwidth import Link
from memgraph.profile.machine_profile import CopyOverhead
from memgraph.storage.mapped_storage import is_offloaded
from memgraph.storage.spill_file import SpillError
from passes import Reload
from tests.support.faults import failing, open_files
from tests.support.smallest_budget import smallest_of
from tests.support.streamed_state import (
    ADAMW,
    TINY,
    Twins,
    assert_kept,
    batch,
    chain,
    facts,
    far,
    loss,
    same,
    streamed,
    streams,
    train,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("small_windows")


def phases(model: memgraph.CompiledModule) -> set[str]:
    """Return the phases of the ops that have a reload before them."""
    ops = model.plan.choice.captured.trace.op
    return {ops[decision.use].phase for decision in model.plan.plan if isinstance(decision, Reload)}


def bare_smallest(model: nn.Module, x: Tensor, **wishes: Any) -> int:
    return smallest_of(lambda: memgraph.plan(model, x, budget=TINY, loss=loss, time_limit=0, **wishes))


@pytest.mark.long
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_streams_forward_only(mode: Callable[[], Any]) -> None:
    plain = chain(12, partial(nn.Dropout, 0.3), partial(nn.BatchNorm1d, 256)).eval()
    want = loss(plain(batch())).detach()
    module = chain(12, partial(nn.Dropout, 0.3), partial(nn.BatchNorm1d, 256)).eval()
    with mode():
        budget = bare_smallest(module, batch())
        assert budget < sum(p.nbytes for p in module.parameters())
        model = streamed(module, budget)
        for _ in range(3):
            assert torch.equal(model(batch()), want)
            assert_kept(model, budget)
    assert model.plan.measured is not None
    assert streams(model)
    assert phases(model) == {"forward"}


@pytest.mark.long
def test_training_and_evaluation_take_turns() -> None:
    twins = Twins(partial(chain, 6, partial(nn.Dropout, 0.3), partial(nn.BatchNorm1d, 256)), budget=4 * 10**6)
    for turn in range(4):
        for model in (twins.plain, twins.model):
            model.train()
        twins.step(seed=turn)
        for model in (twins.plain, twins.model):
            model.eval()
        with torch.no_grad():
            theirs, ours = twins.each(lambda model, _, run: run(model, batch(9)))
        assert torch.equal(theirs, ours)
        twins.assert_same()
        assert_kept(twins.model, twins.budget)
    assert streams(twins.model)


WIDE = 512


def wide(layers: int = 26) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(WIDE, WIDE), nn.ReLU())))


@pytest.mark.long
def test_parameters_of_four_times_the_budget() -> None:
    plain, module = wide(), wide()
    budget = sum(parameter.nbytes for parameter in module.parameters()) // 4
    theirs, ours = ADAMW(plain.parameters()), ADAMW(module.parameters())
    model = streamed(module, budget, optimizer=ours)
    xs = [torch.randn(8, WIDE, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for x in xs:
        assert torch.equal(
            train(plain, theirs, lambda model, x: loss(model(x)), x), train(model, ours, lambda model, x: model(x), x)
        )
        assert_kept(model, budget)
    assert model.plan.measured is not None
    assert same(facts(model, ours), facts(plain, theirs))
    assert far(module, ours) == {"parameter", "gradient", "state"}
    with torch.no_grad():
        assert torch.equal(model(xs[-1]), loss(plain(xs[-1])))
    assert_kept(model, budget)


@pytest.mark.long
def test_two_models_in_one_process() -> None:
    first, second = Twins(), Twins(partial(chain, 7), kind="momentum")
    for seed in range(3):
        first.step(seed=seed)
        second.step(seed=seed)
    assert streams(first.model)
    assert streams(second.model)


@pytest.mark.long
def test_two_models_whose_steps_are_under_way_together() -> None:
    first, second = Twins(), Twins()

    def together(at: int) -> list[Tensor]:
        pairs = [(t.plain, t.theirs) if at == 0 else (t.model, t.ours) for t in (first, second)]
        for _, optimizer in pairs:
            optimizer.zero_grad()
        made = [model(batch(i)) if at else loss(model(batch(i))) for i, (model, _) in enumerate(pairs)]
        (made[0] * made[1]).backward()
        for _, optimizer in pairs:
            optimizer.step()
        return [tensor.detach() for tensor in made]

    for _ in range(4):
        assert same(list(together(0)), list(together(1)))
        first.assert_same()
        second.assert_same()
    assert streams(first.model)
    assert streams(second.model)


@pytest.mark.long
def test_a_module_is_compiled_twice() -> None:
    twins = Twins()
    models = [twins.model, streamed(twins.module, twins.budget, optimizer=twins.ours)]
    for turn in range(6):
        twins.model = models[turn % 2]
        twins.step(seed=turn)
        assert streams(twins.model)


@pytest.mark.long
def test_a_module_is_compiled_again_with_more_memory() -> None:
    twins = Twins()
    twins.train(2)
    twins.model, twins.budget = streamed(twins.module, 10**9, optimizer=twins.ours), 10**9
    for seed in range(3):
        twins.step(seed=seed)
    assert not twins.model.plan.plan


CALLS = {"read": ("preadv", errno.EIO), "write": ("pwritev", errno.ENOSPC)}


@pytest.mark.long
@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_disk_fails_in_mid_step(verb: str, phase: str) -> None:
    twins = Twins()
    twins.train(2)
    call, error = CALLS[verb]
    begin = facts(twins.model, twins.ours)[:12]
    twins.ours.zero_grad()
    made = twins.model(batch()) if phase == "backward" else None
    with failing(call, error, after=1) as seen, pytest.raises(SpillError, match=os.strerror(error)):
        (made if made is not None else twins.model(batch())).backward()
    assert len(seen) > 1
    assert same(facts(twins.model)[:12], begin)
    twins.step(seed=1)
    twins.train(2)


@pytest.mark.long
@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("after", [0, 3])
def test_the_disk_fails_in_mid_update(verb: str, after: int) -> None:
    twins = Twins()
    twins.train(2)

    def step(model: nn.Module, optimizer: Any, run: Any) -> Tensor:
        optimizer.zero_grad()
        made = run(model, batch())
        made.backward()
        if model is twins.model:
            with failing(*CALLS[verb], after=after), pytest.raises(SpillError):
                optimizer.step()
        optimizer.step()
        return made.detach()

    twins.step(step)
    twins.train(2)


@pytest.mark.long
def test_a_state_is_loaded_after_the_disk_failed_in_mid_update() -> None:
    twins = Twins()
    twins.train(2)
    model, optimizer = copy.deepcopy((twins.plain.state_dict(), twins.theirs.state_dict()))
    twins.model(batch()).backward()
    with failing("pwritev", after=2), pytest.raises(SpillError):
        twins.ours.step()
    twins.model.load_state_dict(model)
    twins.ours.load_state_dict(optimizer)
    twins.train(3)


@pytest.mark.long
def test_the_disk_is_full_when_buffers_are_allocated() -> None:
    twins = Twins()
    begin, twins_files = facts(twins.model), open_files()
    with failing("posix_fallocate", errno.ENOSPC), pytest.raises(SpillError, match="No space left"):
        twins.model(batch())
    assert same(facts(twins.model), begin)
    assert not far(twins.module)
    assert open_files() <= twins_files
    twins.train(3)


@pytest.mark.long
def test_the_disk_refuses_what_is_offloaded() -> None:
    twins = Twins()
    begin = facts(twins.model)
    twins.model._planner.step((batch(),), {}, twins.model._outputs)  # links are measured, and workers there
    with failing("pwritev"), pytest.raises(SpillError):
        twins.model(batch())
    assert same(facts(twins.model), begin)
    assert not far(twins.module)
    twins.train(3)


@pytest.mark.long
def test_files_go_with_the_model() -> None:
    twins = Twins()
    twins.train(2)
    before = open_files()
    del twins
    gone = open_files()
    assert gone < before
    for _ in range(2):
        twins = Twins()
        twins.train(2)
        del twins
        assert open_files() <= gone


def test_with_enough_memory_nothing_is_streamed() -> None:
    twins = Twins(budget=10**9)
    for seed in range(3):
        twins.step(seed=seed)
    assert not twins.model.plan.plan
    assert not far(twins.module, twins.ours)


def test_activations_go_before_the_state_if_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose activations take most, and a budget that is a little less; on a disk that other work leaves alone."""
    link = Link(((1 << 20, 1000.0),))
    monkeypatch.setattr("memgraph.profile.machine_profile.measure_files", lambda space, room: (link, link))
    monkeypatch.setattr("memgraph.profile.machine_profile.measure_copy_overhead", lambda *_: CopyOverhead(10.0, 0.0))
    module = chain(3)
    x = torch.cat([batch()] * 512)
    optimizer = ADAMW(module.parameters())
    plain = memgraph.plan(module, x, budget=10**9, optimizer=optimizer, loss=loss, time_limit=0).peak
    model = streamed(module, plain - (1 << 19), optimizer=optimizer)
    model(x).backward()
    assert model.plan.plan
    assert not streams(model)
    assert not any(is_offloaded(parameter.detach()) for parameter in module.parameters())
