"""A forward that looks at values of tensors is captured with the values of the call, and each step checks them."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.capture.capture import capture
from memgraph.profile import measuring_room
from passes import Stream
from tests.support.allocator_meter import compiler, preloaded
from tests.support.assumed_values import assumed_values
from tests.support.counted_guards import Branching
from tests.support.faults import ROOM
from tests.support.smallest_budget import smallest_of
from tests.support.streamed_state import batch, chain, loss

Ask = Callable[["Asking", Tensor, Tensor], Tensor]
MASKS = [torch.arange(8) < 5, torch.arange(8) % 2 == 0, torch.arange(8) >= 0]


class Asking(nn.Module):
    """Batch norm writes buffers, dropout draws: both have to be undone if a guard fails after them."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.ask = ask
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.row = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = nn.functional.dropout(self.norm(self.first(x)), 0.25)
        return self.last(self.ask(self, h, mask)).pow(2).mean()


def put_row(model: Asking, h: Tensor, mask: Tensor) -> Tensor:
    h = h * 1.0
    h[mask] = model.row
    return h


def put_rows(model: Asking, h: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros_like(h).masked_scatter(mask[:, None], h[mask] * 2)


def twice_if_many(model: Asking, h: Tensor, mask: Tensor) -> Tensor:
    return h * 2 if mask.sum() > 4 else h.exp()


ASKS: dict[str, Ask] = {
    "a branch": twice_if_many,
    "a number": lambda model, h, mask: h[: int(mask.sum())],
    "rows of a mask": lambda model, h, mask: h[mask],
    "a mask beside an index": lambda model, h, mask: h[:, :8][mask, mask.nonzero()[:, 0] % 8, None] * model.row,
    "a mask of elements": lambda model, h, mask: h[(mask[:, None] & (torch.arange(16) < 3))].view(-1, 1) * model.row,
    "nonzero": lambda model, h, mask: h.index_select(0, mask.nonzero()[:, 0]),
    "one-dimensional indices": lambda model, h, mask: h[torch.where(mask)[0]],
    "masked_select": lambda model, h, mask: h.masked_select(mask[:, None]).view(-1, 16),
    "values put by a mask": put_row,
    "masked_scatter": put_rows,
    "unique": lambda model, h, mask: h[torch.unique(torch.arange(8) * mask)],
    "inverse of unique": lambda model, h, mask: h[torch.unique(mask.long(), return_inverse=True)[1]] * 1.5,
    "unique_consecutive": lambda model, h, mask: h[torch.unique_consecutive(mask.cumsum(0)) % 8],
    "repeat_interleave": lambda model, h, mask: h.repeat_interleave(mask.long() + 1, dim=0),
    "bincount": lambda model, h, mask: h[: len(torch.bincount(mask.cumsum(0)))],
    "tolist": lambda model, h, mask: torch.cat([h[i : i + 1] for i, on in enumerate(mask.tolist()) if on]),
    "a split by sizes": lambda model, h, mask: h.split([int(mask.sum()), 8 - int(mask.sum())])[0],
    "equal": lambda model, h, mask: h if torch.equal(mask, torch.arange(8) < 5) else -h,
    "a loop": lambda model, h, mask: sum((h * i for i in range(int(mask.sum()))), h),
    "one_hot": lambda model, h, mask: h + nn.functional.one_hot(mask.cumsum(0)).sum(1, keepdim=True),
    "allclose": lambda model, h, mask: h if torch.allclose(mask.float(), torch.ones(8)) else h.tanh(),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ASKS)
def test_steps_equal_eager_to_the_bit_while_values_change(name: str) -> None:
    torch.manual_seed(0)
    model = Asking(ASKS[name])
    eager = copy.deepcopy(model)
    compiled = memgraph.compile(model, ROOM)
    for step, mask in enumerate([*MASKS, *MASKS]):
        assert_same_step(compiled, model, eager, (torch.randn(8, 16), mask), step)
    assert len(compiled.plans) <= len(MASKS)


def assert_same_step(compiled: nn.Module, model: nn.Module, eager: nn.Module, args: Sequence[Any], seed: int) -> None:
    """Run a step of both from the same seed, and compare outputs, gradients, buffers and generators."""
    found = []
    for run, owner in ((compiled, model), (eager, eager)):
        torch.manual_seed(seed)
        owner.zero_grad()
        loss = run(*args)
        loss.backward()
        gradients = [parameter.grad for parameter in owner.parameters()]
        found.append([loss, *gradients, *owner.buffers(), torch.get_rng_state()])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or ours.numpy(force=True).tobytes() == theirs.numpy(force=True).tobytes()


def test_a_value_that_returns_finds_its_plan() -> None:
    model = Asking(twice_if_many)
    compiled = memgraph.compile(model, ROOM)
    for mask in (MASKS[2], MASKS[1], MASKS[2], MASKS[1]):
        model.zero_grad()
        compiled(torch.randn(8, 16), mask).backward()
    assert len(compiled.plans) == 2
    (guard,) = assumed_values(compiled.plan)
    assert guard.text == "the value is False"
    assert guard.where.startswith("test_value_guards.py:")
    assert guard.failures == 1  # the third step tried it, since it was the latest
    assert "rests on 1 value of tensors" in str(compiled.plan)


def test_a_nan_in_mid_training_is_met_as_in_eager() -> None:
    def repair(model: Asking, h: Tensor, mask: Tensor) -> Tensor:
        return h if torch.isfinite(h).all() else torch.nan_to_num(h)

    model = Asking(repair)
    eager = copy.deepcopy(model)
    compiled = memgraph.compile(model, ROOM)
    for step in range(5):
        x = torch.randn(8, 16)
        if step == 2:
            x[0, 0] = torch.nan
        assert_same_step(compiled, model, eager, (x, MASKS[0]), step)
    assert len(compiled.plans) == 2


@pytest.mark.long
@pytest.mark.skipif(compiler() is None, reason="the second meter is built with a C compiler")
def test_the_budget_holds_in_every_step_those_included_that_are_undone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.counted_guards"]
    lines = subprocess.run(command, env=preloaded(tmp_path), capture_output=True, text=True, check=True).stdout
    steps = [json.loads(line) for line in lines.splitlines()]
    assert [step["plans"] for step in steps] == [1, 1, 1, 2, 2, 2]
    assert [step["failures"] for step in steps] == [0, 0, 0, 1, 1, 2]
    assert all(step["equal"] for step in steps)
    # The first call prices ops and links, too.  The fourth is undone, captured and planned.
    assert all(step["counted"] <= step["budget"] for step in steps[1:])


def test_a_run_for_values_changes_nothing() -> None:
    model = Asking(lambda model, h, mask: h * 2 if h.sum() > 0 else h)
    state, versions = copy.deepcopy(model.state_dict()), [buffer._version for buffer in model.buffers()]
    x = torch.randn(8, 16)
    generator = torch.get_rng_state()
    captured = capture(model, (x, MASKS[0]), {})
    assert captured.guards
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    assert [buffer._version for buffer in model.buffers()] == versions


def test_buffers_are_written_after_the_last_guard() -> None:
    captured = capture(Asking(twice_if_many), (torch.randn(8, 16), MASKS[0]), {})
    names = [str(node.target) for node in captured.graph.graph.nodes]
    guard = max(i for i, name in enumerate(names) if name.startswith("memgraph_guards"))
    writes = [i for i, name in enumerate(names) if name in ("aten.copy_.default", "aten.add_.Tensor")]
    assert writes
    assert min(writes) > guard


def test_the_models_own_check_raises_its_own_error() -> None:
    def check(model: Asking, h: Tensor, mask: Tensor) -> Tensor:
        if not mask.any():
            raise ValueError("nothing is selected")
        return h

    compiled = memgraph.compile(Asking(check), ROOM)
    x = torch.randn(8, 16)
    compiled(x, MASKS[0]).backward()
    buffers = [buffer.clone() for buffer in compiled.buffers()]
    with pytest.raises(ValueError, match="nothing is selected"):
        compiled(x, torch.zeros(8, dtype=torch.bool))
    assert all(map(torch.equal, compiled.buffers(), buffers))
    compiled(x, MASKS[0]).backward()


@pytest.mark.long
def test_values_that_never_repeat_get_one_warning_with_the_line() -> None:
    model = Asking(lambda model, h, mask: h[: int(mask.sum())])
    compiled = memgraph.compile(model, ROOM)
    with pytest.warns(RuntimeWarning, match=r"test_value_guards\.py:\d+(.|\n)*torch\.where") as caught:
        for count in range(1, 12):
            compiled(torch.randn(16, 16), torch.arange(16) < count)
    assert sum("graphs were captured" in str(warning.message) for warning in caught) == 1


def test_a_value_that_differs_when_the_same_call_runs_again_is_refused() -> None:
    clock = SimpleQueue[int]()  # its state does not show
    for number in range(20):
        clock.put(number)

    def odd(model: Asking, h: Tensor, mask: Tensor) -> Tensor:
        return h if mask.sum() + torch.tensor(100 * (-1) ** clock.get()) > 5 else -h

    compiled = memgraph.compile(Asking(odd), ROOM)
    with pytest.raises(memgraph.CaptureError, match=r"test_value_guards\.py:\d+ on a value that is not the same"):
        compiled(torch.randn(8, 16), MASKS[0])


def test_a_run_for_values_above_the_budget_is_refused_with_one_that_does() -> None:
    class Inference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            y = (x[:, None] * self.weight).exp()
            return (y if y.sum() > 0 else -y).sum(1).mean()

    x = torch.randn(4096)
    with pytest.raises(memgraph.BudgetError, match="branches on values of tensors") as caught:
        memgraph.compile(Inference(), 300_000)(x)
    memgraph.compile(Inference(), caught.value.smallest)(x).backward()


def test_a_call_that_adds_to_gradients_needs_no_room_for_a_run_that_it_does_not_have() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16_384))

        def forward(self, x: Tensor) -> Tensor:
            first = x.sin()
            second = first.sin()
            third = second.sin()  # all three are held until forward ends
            return self.weight.mean() * (third if first[0] == x[0].sin() else second).mean()

    x = torch.randn(65_536)
    with pytest.raises(memgraph.BudgetError, match="branches on values of tensors") as caught:
        memgraph.compile(Holding(), 400_000)(x)
    compiled = memgraph.compile(Holding(), caught.value.smallest)
    for _ in range(2):
        compiled(x).backward()


@pytest.mark.long
def test_a_run_for_values_is_beside_the_optimizers_states() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 512), nn.Linear(512, 64)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.first(x).relu())
            return (y if y.sum() > 0 else -y).square().mean()

    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = memgraph.compile(model, 1_500_000, optimizer=optimizer, offload=None)
    compiled(torch.randn(16, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(memgraph.BudgetError, match=r"is run once without backward to find them, which takes (\d+)"):
        compiled(torch.randn(240, 64))


def test_the_budget_that_it_names_is_enough_for_the_step_too() -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.first(x).relu())
            return y.nan_to_num() if y.isnan().any() else y

    x = torch.randn(1024, 64)
    with pytest.raises(memgraph.BudgetError, match=r"which takes \d+, and the step \d+: give budget=") as caught:
        memgraph.compile(Checked(), 1_200_000)(x)
    result = memgraph.compile(Checked(), caught.value.smallest)(x)
    result.square().mean().backward()


def test_workspaces_of_libraries_count_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers(x)
            return y.nan_to_num() if y.isnan().any() else y

    def needed() -> int:
        with pytest.raises(memgraph.BudgetError) as caught:
            memgraph.compile(Checked(), 1_200_000)(torch.randn(1024, 64))
        found = re.search(r"to find them, which takes (\d+)", str(caught.value))
        assert found is not None
        return int(found[1])

    before = needed()
    monkeypatch.setattr(measuring_room, "libraries_nbytes", lambda device: 10_000)
    assert needed() == before + 10_000


def flags() -> list[Tensor]:
    none, some = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    return [none, none, some, none, some, none]


def train(model: nn.Module, x: Tensor, **options: Any) -> memgraph.CompiledModule:
    """Train a model whose branch changes, beside eager: all parameters and buffers agree after each step."""
    eager = copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, eager))
    compiled = memgraph.compile(model, optimizer=optimizer, **options)
    for step, flag in enumerate(flags()):
        torch.manual_seed(step)
        compiled(x, flag).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(step)
        eager(x, flag).backward()
        plain.step()
        plain.zero_grad()
        assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))
    assert len(compiled.plans) == 2
    return compiled


@pytest.mark.long
def test_a_run_with_fused_updates_is_undone() -> None:
    train(Branching(), torch.randn(64, 64), budget=ROOM, fuse_update=True)


class Streamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chain = chain()

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        y = self.chain(nn.functional.dropout(x, 0.2))
        return loss(y.tanh() if flag.any() else y)


@pytest.mark.long
def test_a_run_with_streamed_state_is_undone(tmp_path: Path) -> None:
    def smallest() -> int:
        model = Streamed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return smallest_of(lambda: memgraph.compile(model, 1000, optimizer=optimizer)(batch(), flags()[0]))

    compiled = train(Streamed(), batch(), budget=int(1.1 * smallest()), spill_dir=tmp_path, accumulate=False)
    assert any(isinstance(decision, Stream) for report in compiled.plans for decision in report.plan)


class Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.layer(x)
        return (y if mask.sum() > 2 else y / 2).square().mean()


def test_guards_hold_for_each_part_of_a_batch() -> None:
    model = Halving()
    compiled = memgraph.compile(model, ROOM, microbatches=2, reduction="mean")
    for mask in (MASKS[0], MASKS[2], MASKS[0]):
        compiled.zero_grad()
        x = torch.randn(8, 16)
        found = compiled(x, mask)
        halves = [model(*half) for half in zip(x.chunk(2), mask.chunk(2), strict=True)]
        assert torch.allclose(found, torch.stack(halves).mean())


class Describing(Halving):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        sizes = torch.tensor([8.0, 16.0])
        return super().forward(x if sizes.sum() > 0 else -x, mask)


def test_a_graph_keeps_no_constants_that_nothing_reads() -> None:
    graph = capture(Describing(), (torch.randn(8, 16), MASKS[0]), {}).graph
    read = {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}
    kept = {name for name, value in vars(graph).items() if isinstance(value, Tensor)}
    assert kept | set(dict(graph.named_buffers())) <= read
