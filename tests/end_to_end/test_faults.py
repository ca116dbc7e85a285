"""Errors in a step, in capture or in planning are raised unchanged, and the next step is not affected."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._C._autograd import _profiler_enabled

import memgraph
from memgraph.planning import assembly, planner, search
from passes.schedule.schedule import Placement
from tests.support.faults import ROOM, Net, Running, assert_next_step_right, batch, fresh, living, open_files, step
from tests.support.forced_plans import given_up

PLACES = [(0.0, RuntimeError), (0.3, KeyboardInterrupt), (0.6, RuntimeError), (1.0, KeyboardInterrupt)]


@pytest.mark.long
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_what_is_raised_in_mid_step_comes_out_and_the_next_step_is_right(fate: Placement, half: str) -> None:
    module, compiled = fresh(Running)
    step(compiled)
    compiled.zero_grad()
    before, files = living(), open_files()
    for place, error in PLACES:
        with broken(compiled, half, place, error), pytest.raises(error, match="injected"):
            step(compiled)
        compiled.zero_grad()
        assert_next_step_right(module, compiled)
    compiled.zero_grad()
    assert living() <= before
    assert open_files() <= files + 1


@pytest.mark.long
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_what_is_raised_while_the_first_step_is_measured_leaves_no_profiler_behind(fate: Placement, half: str) -> None:
    module, compiled = fresh()
    loss = compiled(batch()).square().mean()
    if half == "backward":
        with broken(compiled, half, 0.5, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            loss.backward()
    else:
        del loss
        with broken(compiled, half, 0.5, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            compiled(batch())
    assert compiled.plan.measured is None
    assert not _profiler_enabled()
    assert_next_step_right(module, compiled)
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak


def test_backward_may_be_tried_again_after_an_error_if_the_graph_is_retained(fate: Placement) -> None:
    module, compiled = fresh()
    expected = step(module)
    module.zero_grad()
    torch.manual_seed(7)
    loss = compiled(batch()).square().mean()
    with broken(compiled, "backward", 0.0, RuntimeError), pytest.raises(RuntimeError, match="injected"):
        loss.backward(retain_graph=True)
    loss.backward()
    assert all(map(torch.equal, expected[1:-1], [p.grad for p in module.parameters() if p.grad is not None]))


def test_the_generator_is_not_left_in_an_earlier_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "make_plan", given_up(Placement.RECOMPUTE_PER_USE))
    _, compiled = fresh()
    step(compiled)
    compiled.zero_grad()
    graph: fx.GraphModule = compiled._latest.parts.halves.backward
    swapped = next(i for i, node in enumerate(nodes_of(graph)) if node.target is torch.ops.memgraph.swap_rng.default)
    loss = compiled(batch()).square().mean()
    state = torch.get_rng_state()
    with poisoned(graph, nodes_of(graph)[swapped + 1], KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_of_the_users_own_forward_stays_what_it_is_and_the_next_call_works() -> None:
    class Moody(Net):
        bad = True

        def forward(self, x: Tensor) -> Tensor:
            if self.bad:
                raise KeyError("mine")
            return super().forward(x)

    module = Moody()
    compiled = memgraph.compile(module, ROOM)
    with pytest.raises(KeyError, match="mine"):
        compiled(batch())
    module.bad = False
    assert_next_step_right(module, compiled)


def test_a_capture_that_is_interrupted_leaves_the_module_as_it_was() -> None:
    module, compiled = fresh()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    kept = dict(vars(module))
    handle = module.last.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        compiled(batch())
    handle.remove()
    assert vars(module) == kept
    assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())
    assert_next_step_right(module, compiled)


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("gone_wrong", ["rewrite", "partition", "open_tier"])
def test_a_plan_that_is_interrupted_is_made_again_at_the_next_call(gone_wrong: str) -> None:
    module, compiled = fresh()
    with mock.patch.object(assembly, gone_wrong, interrupt), pytest.raises(KeyboardInterrupt):
        compiled(batch())
    assert_next_step_right(module, compiled)


@contextmanager
def broken(compiled: memgraph.CompiledModule, half: str, place: float, error: type[BaseException]) -> Iterator[None]:
    """One op of a half of the latest step raises; `place` is where in the half it stands."""
    graph: fx.GraphModule = getattr(compiled._latest.parts.halves, half)
    nodes = nodes_of(graph)
    node = nodes[int(place * (len(nodes) - 1))]
    with poisoned(graph, node, error):
        yield


@contextmanager
def poisoned(graph: fx.GraphModule, node: fx.Node, error: type[BaseException]) -> Iterator[None]:
    target = node.target

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error("injected")

    node.target = fail
    graph.recompile()
    try:
        yield
    finally:
        node.target = target
        graph.recompile()


def nodes_of(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def test_a_file_that_can_not_be_opened_for_want_of_descriptors_is_an_error_that_says_so() -> None:
    module, compiled = fresh()
    full = OSError(errno.EMFILE, "Too many open files", "a_late_part_of_torch.py")
    said = pytest.raises(memgraph.MemgraphError, match=r"can't be planned: .*a_late_part_of_torch.py.*ulimit -n")
    with mock.patch.object(planner, "GraphPlanner", side_effect=full), said:
        step(compiled)
    assert_next_step_right(module, compiled)
