"""Attributes that forward sets are set by each run, and refused where each call would differ from the one before."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import memgraph
from memgraph.guards.attribute_guard import AttributeGuard
from memgraph.guards.written_attributes import written_attributes
from tests.support.compare import ROOM

X = torch.linspace(-1, 1, 8).view(2, 4)


class Leaving(nn.Module):
    """Its forward does something with its attributes, and scales by what that gives."""

    def __init__(self, then: Callable[[Any, Tensor], Any], **held: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4))
        self.then = then
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.then(self, x)
        return self.body(x) if scale is None else self.body(x) * scale


def count(part: Any, x: Tensor) -> int:
    part.count = getattr(part, "count", 0) + 1
    return int(part.count)


def mark(part: Any, x: Tensor) -> float:
    scale = 1.0 if hasattr(part, "done") else 2.0
    part.done = True
    return scale


def fill(part: Any, x: Tensor) -> int:
    part.filled.append(1)
    return len(part.filled)


def fill_deep(part: Any, x: Tensor) -> int:
    part.held.inner["a"].append(1)
    return len(part.held.inner["a"])


def toggle(part: Any, x: Tensor) -> float:
    part.held.on = not part.held.on
    return 2.0 if part.held.on else 1.0


def add(part: Any, x: Tensor) -> int:
    part.seen.add(len(part.seen))
    return len(part.seen)


def remove(part: Any, x: Tensor) -> float:
    return float(vars(part).pop("first", 1.0))


def mark_below(part: Any, x: Tensor) -> float:
    return mark(part.body[0], x)


def remember(part: Any, x: Tensor) -> Tensor:
    before = getattr(part, "before", None)
    part.before = x
    return torch.ones(()) if before is None else before.sum()


def remember_deep(part: Any, x: Tensor) -> float:
    part.held.inner["a"] = x.sum()
    return 1.0


def decide(part: Any, x: Tensor) -> float:
    scale = 1.0 if part.kind is None else 2.0
    part.kind = "b"
    return scale


def held() -> types.SimpleNamespace:
    return types.SimpleNamespace(inner={"a": []}, on=False)


@pytest.mark.parametrize(
    ("then", "attributes", "says"),
    [
        (count, {}, "forward changes count, which changes its next call"),
        (fill, {"filled": []}, "forward changes filled, which changes its next call"),
        (fill_deep, {"held": held()}, "forward changes held"),
        (toggle, {"held": held()}, "forward changes held"),
        (add, {"seen": set()}, "forward changes seen, which changes its next call"),
    ],
)
def test_what_makes_another_call_of_each_next_one_is_refused_and_taken_back(
    then: Any, attributes: dict[str, Any], says: str
) -> None:
    module = Leaving(then, **copy.deepcopy(attributes))
    attributes_of = AttributeGuard(module)
    before = attributes_of.groups
    with pytest.raises(memgraph.CaptureError, match=says):
        memgraph.compile(module, ROOM)(X)
    assert attributes_of.groups == before


def test_a_layer_that_forward_makes_is_refused_until_it_is_there() -> None:
    def then(part: Any, x: Tensor) -> Tensor:
        if not hasattr(part, "late"):
            part.late = nn.Linear(4, 4)
        return torch.as_tensor(part.late(x))

    module = Leaving(then)
    with pytest.raises(memgraph.CaptureError, match=r"forward changes late, .* run the plain module once before"):
        memgraph.compile(module, ROOM)(X)
    expected = module(X)
    assert torch.equal(memgraph.compile(module, ROOM)(X), expected)


def test_a_buffer_that_forward_registers_is_refused_by_its_name() -> None:
    def then(part: Any, x: Tensor) -> Any:
        if not hasattr(part, "late"):
            part.register_buffer("late", x.mean(0).detach())
        return part.late

    module = Leaving(then)
    with pytest.raises(memgraph.CaptureError, match="forward registers the buffer late, or gives it its first tensor"):
        memgraph.compile(module, ROOM)(X)
    expected = module(X)
    assert torch.equal(memgraph.compile(module, ROOM)(X), expected)


def note(part: Any, x: Tensor) -> None:
    part.width, part.note = x.shape[-1], {"shape": list(x.shape), "dtype": x.dtype}


def note_once(part: Any, x: Tensor) -> float:
    if not hasattr(part, "scale"):
        part.scale = float(torch.arange(4).max())
    return float(part.scale)


def keep_input(part: Any, x: Tensor) -> None:
    part.last = x


def clear(part: Any, x: Tensor) -> None:
    part.filled.clear()
    part.filled.extend([1, 2])


def assert_same(module: nn.Module, twin: nn.Module, *batches: Tensor) -> Any:
    """Compiled, a module returns what its twin does, and has its gradients."""
    compiled: Any = memgraph.compile(module, ROOM)
    for rows in batches:
        found, expected = compiled(rows), twin(rows)
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(found, expected)
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    return compiled


@pytest.mark.long
@pytest.mark.parametrize(
    ("then", "kinds"),
    [
        (note, 1), (note_once, 1), (keep_input, 1), (clear, 1), (mark, 2), (mark_below, 2), (remove, 2), (remember, 2),
        (remember_deep, 2), (decide, 2),
    ],
)  # fmt: skip
def test_what_forward_leaves_is_there_after_each_call(then: Any, kinds: int) -> None:
    module = Leaving(then, filled=[], first=2.0, kind=None, held=held())
    twin = copy.deepcopy(module)
    compiled = assert_same(module, twin, X, X, X)
    assert len({id(variant.captured) for variant in compiled._kept.variants}) == kinds
    assert left(module) == left(twin)


def extend(part: Any, x: Tensor) -> Tensor:
    """Short circuit: the first call does not read `longest`."""
    if getattr(part, "table", None) is None or len(x) > part.longest:
        part.longest = len(x)
        part.table = torch.arange(float(len(x)))
    return torch.as_tensor(part.table[: len(x), None])


def test_what_the_next_call_reads_though_this_one_did_not_is_in_place_for_it() -> None:
    module = Leaving(extend, longest=0)
    twin = copy.deepcopy(module)
    assert_same(module, twin, X, X, X[:1], torch.cat([X, X]), X, X[:1])
    assert module.longest == twin.longest == 4


def divide(part: Any, x: Tensor) -> None:
    part.ratio = len(x) / 4


def root(part: Any, x: Tensor) -> None:
    part.ratio = {"of rows": len(x) ** -0.5, "many": len(x) > 2}


def wrap(part: Any, x: Tensor) -> None:
    part.ratio = types.SimpleNamespace(rows=len(x) / 2)


@pytest.mark.parametrize("then", [divide, root, wrap])
def test_a_number_that_is_made_of_a_length_is_stored_for_each_length(then: Any) -> None:
    module, rows = Leaving(then), torch.linspace(-1, 1, 28).view(7, 4)
    twin = copy.deepcopy(module)
    for count in (2, 3, 5, 7, 2):
        assert_same(module, twin, rows[:count])
    compiled: Any = memgraph.compile(module, ROOM)
    for count in (2, 3, 5, 7, 2):
        compiled(rows[:count]), twin(rows[:count])
        assert module.ratio == twin.ratio


def test_a_module_that_forward_returns_is_refused() -> None:
    with pytest.raises(memgraph.CaptureError, match="forward returns a module, Linear, and a captured step"):
        memgraph.compile(Returning(), ROOM)(X)


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.body(x), self.body


def left(module: Any) -> list[str]:
    names = ("width", "note", "scale", "last", "filled", "done", "first", "before", "held", "kind")
    own = [(name, vars(module)[name]) for name in names if name in vars(module)]
    return [*map(repr, own), str(vars(module.body[0]).get("done"))]


PRUNED = partial(prune.l1_unstructured, name="weight", amount=0.5)


@pytest.mark.parametrize("remake", [nn.utils.spectral_norm, nn.utils.weight_norm, PRUNED])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_weight_that_a_hook_makes_anew_each_time_is_there_after_each_call(remake: Any) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(remake(nn.Linear(4, 4)))

    module, twin = made(), made()
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (module, twin)]
    compiled = memgraph.compile(module, ROOM)
    for _ in range(3):
        for run in (compiled, twin):
            run(X).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(vars(module[0])["weight"], vars(twin[0])["weight"])
    assert written_attributes(module).held == []


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_weight_that_a_hook_makes_is_made_in_each_part_of_a_batch() -> None:
    layer = nn.utils.weight_norm(nn.Linear(4, 4))
    assert torch.equal(memgraph.compile(layer, ROOM, microbatches=2)(X), torch.cat([layer(row) for row in X.split(1)]))


def test_parts_of_a_batch_may_not_note_how_many_rows_there_are() -> None:
    def then(part: Any, x: Tensor) -> None:
        part.rows = len(x)

    with pytest.raises(memgraph.CaptureError, match="writes something to rows that depends on the number of rows"):
        memgraph.compile(Leaving(then), ROOM, microbatches=2)(X)


@pytest.mark.parametrize("then", [count, mark, fill, remember])
def test_parts_of_a_batch_are_calls_as_well(then: Any) -> None:
    with pytest.raises(memgraph.CaptureError, match=r"forward changes (count|done|filled|before)"):
        memgraph.compile(Leaving(then, filled=[]), ROOM, microbatches=2)(X)


def test_parts_of_a_batch_may_leave_what_makes_no_difference() -> None:
    def then(part: Any, x: Tensor) -> None:
        part.width = x.shape[-1]

    module = Leaving(then)
    assert torch.equal(
        memgraph.compile(module, ROOM, microbatches=2)(X), torch.cat([module(row) for row in X.split(1)])
    )


def test_a_loss_inside_hides_nothing_that_forward_leaves() -> None:
    compiled = memgraph.compile(Leaving(toggle, held=held()), ROOM, loss=lambda out: out.sum())
    with pytest.raises(memgraph.CaptureError, match="forward changes held"):
        compiled(X)


class Counting(nn.Module):
    """A layer that counts its calls, within a model that does."""

    def __init__(self, then: Callable[[Any, Tensor], Any] = lambda part, y: y) -> None:
        super().__init__()
        self.layer = Leaving(count_up, calls=3)
        self.calls, self.decay, self.kind = 0, 1.0, "a"
        self.then = then

    def forward(self, x: Tensor) -> Any:
        self.calls = self.calls + 1
        self.decay = 1 - self.decay * 0.5
        return self.then(self, self.layer(self.layer(x)))


def is_same_gradient(ours: Tensor, theirs: Tensor) -> bool:
    assert ours.grad is not None
    assert theirs.grad is not None
    return torch.equal(ours.grad, theirs.grad)


def count_up(part: Any, x: Tensor) -> None:
    part.calls += 1


def test_numbers_that_are_only_counted_with_are_counted_as_in_eager_by_the_steps_of_one_capture() -> None:
    model = Counting()
    twin = copy.deepcopy(model)
    compiled = memgraph.compile(model, ROOM)
    for step in range(4):
        for module in (compiled, twin):
            module.zero_grad()
            module(X).sum().backward()
        counted = [(part.calls, part.decay, vars(part.layer)["calls"]) for part in (model, twin)]
        assert counted[0] == counted[1]
        assert counted[0][0] == step + 1
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(is_same_gradient(ours, theirs) for ours, theirs in pairs)
        model.kind = twin.kind = "b" if step > 1 else "a"
    assert len(compiled.plans) == 1  # forward does not read the kind


@pytest.mark.parametrize(
    "then",
    [
        lambda part, y: y if part.calls < 3 else -y,
        lambda part, y: y * part.calls,
        lambda part, y: y * torch.tensor(part.decay),
        lambda part, y: (y, part.calls),
        lambda part, y: (y, f"{part.calls}"),
        lambda part, y: y.roll(part.calls),
        lambda part, y: y if part.calls % 2 else -y,
        lambda part, y: -y if type(part.calls) is int else y,
    ],
)
def test_a_number_that_is_counted_and_read_is_refused_and_put_back(then: Any) -> None:
    model = Counting(then)
    with pytest.raises(memgraph.CaptureError, match="forward changes calls from 0 to 1"):
        memgraph.compile(model, ROOM)(X)
    assert (model.calls, model.decay, vars(model.layer)["calls"]) == (0, 1.0, 3)
