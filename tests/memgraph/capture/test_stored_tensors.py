"""Tensors that forward stores in attributes are results of the step, and arguments of the next one if that reads them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memgraph
from memgraph.guards.written_attributes import written_attributes
from tests.support.compare import ROOM, assert_equal


class Storing(nn.Module):
    """Its forward does something with its attributes; `loss` may read them."""

    def __init__(self, then: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.then = nn.Linear(8, 8), then
        self.cache: Any = None
        self.mean = torch.zeros(8)
        self.kept: list[Tensor] = []
        self.state: Any = None
        self.table: dict[str, Any] = {}
        self.object = self.same_object = Kept()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.body(x))


def last(part: Any, y: Tensor) -> Tensor:
    part.last = y.detach()
    return y


def last_of_a_half(part: Any, y: Tensor) -> Tensor:
    part.last, part.rest = y.detach()[:2], {"rows": [y[2:] * 2], "count": 3}
    return y


def lazily(part: Any, y: Tensor) -> Tensor:
    if part.cache is None:
        part.cache = torch.linspace(0, 1, len(y))[:, None]
    return y + torch.as_tensor(part.cache)


def running_mean(part: Any, y: Tensor) -> Tensor:
    part.mean = 0.9 * part.mean + 0.1 * y.mean(0).detach()
    return y * torch.as_tensor(part.mean)


def recurrent(part: Any, y: Tensor) -> Tensor:
    before = torch.zeros_like(y) if part.state is None else part.state[0]
    after = torch.tanh(before + y)
    part.state = (after.detach(), {"twice": after.detach() * 2})
    return after


def cleared(part: Any, y: Tensor) -> Tensor:
    part.kept.clear()
    part.kept += [y, y * 2]
    return y


def made_anew(part: Any, y: Tensor) -> Tensor:
    part.kept = []
    part.kept.append(y.detach())
    return y


def in_a_dict(part: Any, y: Tensor) -> Tensor:
    part.table["y"] = y.detach()
    return y


def auxiliary(part: Any, y: Tensor) -> Tensor:
    part.auxiliary = y.square().mean()
    return y


def read_at_once(part: Any, y: Tensor) -> Tensor:
    part.seen = y.tanh()
    return torch.as_tensor(part.seen)


def a_view(part: Any, y: Tensor) -> Tensor:
    part.given, part.scaled = y.t(), y
    return y


def number(part: Any, y: Tensor) -> Tensor:
    part.level = y.mean().item()
    return y


def by_its_dict(part: Any, y: Tensor) -> Tensor:
    before = vars(part).get("last", torch.ones(()))
    part.last = y.detach().mean()
    return y * torch.as_tensor(before)


def written_first(part: Any, y: Tensor) -> Tensor:
    part.kept = []
    for _ in range(2):
        part.kept.append(y.detach())
    return y + sum(part.kept)


def carried_twice(part: Any, y: Tensor) -> Tensor:
    before = y if part.cache is None else part.cache * part.state
    part.cache = part.state = y.detach() * 0.1
    return y + before


def collected(part: Any, y: Tensor) -> Tensor:
    part.kept.clear()
    part.auxiliary = y.square().mean()
    part.kept.append(part.auxiliary)
    return y


class Kept:
    """An object with a tensor."""

    def __init__(self) -> None:
        self.level, self.rest = torch.zeros(8), [torch.ones(8)]


def in_an_object(part: Any, y: Tensor) -> Tensor:
    y = y + part.object.level * part.object.rest[0]
    part.object.level, part.object.rest[0] = y.detach().mean(0), y.detach().std(0)
    return y


def in_an_object_that_is_made_anew(part: Any, y: Tensor) -> Tensor:
    y = y + part.object.level
    part.object = Kept()
    part.object.level = y.detach().mean(0)
    return y


def in_an_object_of_two_attributes(part: Any, y: Tensor) -> Tensor:
    y = y + part.object.level
    part.same_object.level = y.detach().mean(0)
    return y


def counted_beside(part: Any, y: Tensor) -> Tensor:
    part.calls += 1
    part.last = y.detach()
    return y


def cut_off_later(part: Any, y: Tensor) -> Tensor:
    if part.state is not None:
        y = y + part.state.detach()
    part.state = y
    return y


def deleted(part: Any, y: Tensor) -> Tensor:
    scale = getattr(part, "mean", 1.0)
    if hasattr(part, "mean"):
        del part.mean
    return y * scale


def by_a_computed_name(part: Any, y: Tensor) -> Tensor:
    before = getattr(part, "MEAN".lower())
    part.mean = y.detach().mean(0)
    return y + torch.as_tensor(before)


STORING = [
    in_an_object, in_an_object_that_is_made_anew, in_an_object_of_two_attributes, counted_beside, cut_off_later,
    carried_twice, collected, deleted, by_a_computed_name,
    by_its_dict, written_first,
    last, last_of_a_half, lazily, running_mean, recurrent, cleared, made_anew, in_a_dict, auxiliary, read_at_once,
    a_view, number,
]  # fmt: skip


@pytest.mark.parametrize("then", STORING)
def test_attributes_are_those_of_eager_after_each_step(then: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    plain: Any = Storing(then)
    ours = copy.deepcopy(plain)
    compiled: Any = memgraph.compile(ours, ROOM)
    for _ in range(4):
        x = torch.randn(4, 8)
        for module, run in ((plain, plain), (ours, compiled)):
            module.zero_grad()
            (run(x).sum() + (module.auxiliary if then is auxiliary else 0)).backward()
        assert_equal([p.grad for p in plain.parameters()], [p.grad for p in ours.parameters()])
        assert_equal(tensors(ours), tensors(plain))
        assert [x.requires_grad for x in tensors(ours)] == [x.requires_grad for x in tensors(plain)]
    assert len({id(variant.captured) for variant in compiled._kept.variants}) <= 3


@pytest.mark.parametrize(("then", "is_held"), [(read_at_once, False), (by_its_dict, True), (running_mean, True)])
def test_what_forward_reads_before_it_writes_is_an_argument_of_the_next_call(then: Any, is_held: bool) -> None:
    module: Any = Storing(then)
    twin = copy.deepcopy(module)
    compiled = memgraph.compile(module, ROOM)
    for _ in range(3):
        x = torch.ones(2, 8)
        with torch.no_grad():  # the attributes have tensors already when a step is captured
            module(x), twin(x)
        assert_equal([compiled(x)], [twin(x)])
        assert_equal(tensors(module), tensors(twin))
        assert bool(written_attributes(module).held) is is_held


def test_containers_that_the_caller_replaces_get_what_forward_writes() -> None:
    def then(part: Any, y: Tensor) -> Tensor:
        part.table["last"] = y.detach()
        part.kept.clear()
        part.kept.append(y.detach())
        part.object.level = y.detach()
        return y

    module: Any = Storing(then)
    twin = copy.deepcopy(module)
    compiled = memgraph.compile(module, ROOM)
    for step in range(4):
        for each in (module, twin):
            if step >= 2:
                each.table, each.kept, each.object = {}, [], Kept()
        x = torch.randn(2, 8)
        assert_equal([compiled(x)], [twin(x)])
        assert_equal(tensors(module), tensors(twin))


def test_parts_that_share_a_function_may_have_states() -> None:
    module: Any = nn.Sequential(Storing(recurrent), Storing(recurrent))
    module[0].shared = module[1].shared = torch.tanh
    twin = copy.deepcopy(module)
    compiled = memgraph.compile(module, ROOM)
    for _ in range(3):
        x = torch.randn(2, 8)
        assert_equal([compiled(x)], [twin(x)])


def test_an_attribute_may_be_a_buffer_in_calls_of_several_lengths() -> None:
    def then(part: Any, y: Tensor) -> Tensor:
        part.state = part.level
        return y * part.state

    for _ in range(2):
        module: Any = Storing(then)
        module.register_buffer("level", torch.ones(8))
        compiled = memgraph.compile(module, ROOM)
        for rows in (4, 4, 6, 7):
            assert torch.equal(compiled(torch.ones(rows, 8)), module(torch.ones(rows, 8)))
            assert module.state is module.level


class Slots:
    __slots__ = ("slot",)


class SlottedModule(Slots, nn.Module):
    def __init__(self, then: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.then = nn.Linear(8, 8), then
        self.slot: Any = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.body(x))


def slot_counts(part: Any, y: Tensor) -> Tensor:
    part.slot += 1
    return y * part.slot


def slot_keeps(part: Any, y: Tensor) -> Tensor:
    y = y * part.slot
    part.slot = y.detach()
    return y


@pytest.mark.parametrize("then", [slot_counts, slot_keeps])
def test_what_forward_writes_to_a_slot_of_its_module_is_refused_and_put_back(then: Any) -> None:
    module = SlottedModule(then)
    with pytest.raises(memgraph.CaptureError, match=r"forward (changes|stores a tensor in) slot"):
        memgraph.compile(module, ROOM, opaque=False)(torch.ones(2, 8))
    assert module.slot == 1


def test_a_slot_that_the_caller_sets_is_read() -> None:
    module = SlottedModule(lambda part, y: y * part.slot)
    compiled, x = memgraph.compile(module, ROOM), torch.ones(2, 8)
    for module.slot in (1, 2, torch.full((8,), 3.0)):
        assert torch.equal(compiled(x), module(x))


class Hiding(Storing):
    factor = 2.0

    @cached_property
    def table_of_rows(self) -> Tensor:
        return torch.arange(8.0) * self.factor


def test_an_attribute_that_comes_while_another_goes_is_seen() -> None:
    module: Any = Hiding(by_a_cached_property)
    twin = copy.deepcopy(module)
    compiled = memgraph.compile(module, ROOM)
    for step in range(4):
        for each in (module, twin):
            if step == 2:
                del each.table_of_rows
                each.factor = 3.0
        x = torch.randn(2, 8)
        assert_equal([compiled(x)], [twin(x)])


class Cached(Storing):
    """Its class has the names as well."""

    count = None

    @cached_property
    def table_of_rows(self) -> Tensor:
        return torch.linspace(0, 1, 8)


def by_a_cached_property(part: Any, y: Tensor) -> Tensor:
    return y * torch.as_tensor(part.table_of_rows)


def by_a_default_of_the_class(part: Any, y: Tensor) -> Tensor:
    if part.count is None:
        part.count = y.detach().mean()
    return y * torch.as_tensor(part.count)


@pytest.mark.parametrize("then", [by_a_cached_property, by_a_default_of_the_class])
def test_an_attribute_may_take_the_place_of_one_of_the_class(then: Any) -> None:
    module: Any = Cached(then)
    twin = copy.deepcopy(module)
    compiled = memgraph.compile(module, ROOM)
    for _ in range(4):
        x = torch.randn(2, 8)
        assert_equal([compiled(x)], [twin(x)])
        assert_equal(tensors(module), tensors(twin))


def test_an_attribute_of_the_class_that_one_kind_of_call_writes_is_read_by_another() -> None:
    def then(part: Any, y: Tensor) -> Tensor:
        if part.training:
            part.count = y.detach().mean()
        return y if part.count is None else y * part.count

    def eval_reads(part: Any, y: Tensor) -> Tensor:
        if part.training:
            part.count = y.detach().mean()
            return y
        return y * part.count

    for each in (then, eval_reads):
        module: Any = Cached(each)
        twin = copy.deepcopy(module)
        compiled: Any = memgraph.compile(module, ROOM)
        for is_training in (True, True, False, True, False):
            x = torch.randn(2, 8)
            for run in (compiled, twin):
                run.train(is_training)
            assert_equal([compiled(x)], [twin(x)])
            assert_equal(tensors(module), tensors(twin))


def test_a_constant_is_written_again_where_the_caller_has_changed_it() -> None:
    def then(part: Any, y: Tensor) -> Tensor:
        part.count = "rows"
        return y

    module: Any = Cached(then)
    compiled, x = memgraph.compile(module, ROOM), torch.ones(2, 8)
    for _ in range(3):
        compiled(x)
        assert module.count == "rows"
        compiled(torch.ones(3, 8))
        module.count = "other"


def tensors(module: nn.Module) -> list[Tensor]:
    """Return the values of its attributes, numbers as tensors."""
    names = [name for name in vars(module) if name[0] != "_" and name not in ("then", "training")]
    values = [vars(module)[name] for name in sorted(names)]
    own = [vars(value) if isinstance(value, Kept) else value for value in values]
    return [torch.as_tensor(leaf) for leaf in pytree.tree_leaves(own) if leaf is not None]


def test_a_stored_tensor_is_the_one_that_is_returned() -> None:
    module: Any = Storing(read_at_once)
    compiled = memgraph.compile(module, ROOM)
    for _ in range(2):
        assert compiled(torch.ones(2, 8)) is module.seen


def test_a_stored_parameter_is_the_parameter() -> None:
    def then(part: Any, y: Tensor) -> Tensor:
        part.kept = [part.body.weight]
        return y

    module: Any = Storing(then)
    memgraph.compile(module, ROOM)(torch.ones(2, 8))
    assert module.kept[0] is module.body.weight


class Slotted:
    __slots__ = ("held",)


def in_slots(part: Any, y: Tensor) -> Tensor:
    part.slotted.held = y.detach()
    return y


def in_a_default_dict(part: Any, y: Tensor) -> Tensor:
    part.by_default["y"] = y.detach()
    return y


def by_its_data(part: Any, y: Tensor) -> Tensor:
    part.mean.data = y.detach().mean(0)
    return y


def a_new_leaf(part: Any, y: Tensor) -> Tensor:
    part.cut = y.detach().requires_grad_()
    return part.body(part.cut)


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (in_slots, "stores a tensor in slotted"), (in_a_default_dict, "stores a tensor in by_default"),
        (by_its_data, "sets .data of the tensor mean"), (a_new_leaf, "called requires_grad_"),
    ],
)  # fmt: skip
def test_where_no_write_can_be_done_again_it_is_refused(then: Callable[[Any, Tensor], Tensor], says: str) -> None:
    module: Any = Storing(then)
    module.slotted, module.by_default = Slotted(), defaultdict(list)
    with pytest.raises(memgraph.CaptureError, match=says):
        memgraph.compile(module, ROOM, opaque=False)(torch.ones(2, 8))
    assert torch.equal(module.mean, torch.zeros(8))


def test_what_is_kept_by_the_caller_stays() -> None:
    module: Any = Storing(last)
    compiled, kept = memgraph.compile(module, ROOM), []
    for i in range(3):
        compiled(torch.full((2, 8), float(i)))
        kept.append(module.last)
    assert_equal(kept, [module.body(torch.full((2, 8), float(i))).detach() for i in range(3)])


def test_a_state_that_is_not_detached_is_differentiated_once_as_in_eager() -> None:
    def then(part: Any, y: Tensor) -> Tensor:
        part.cache = y if part.cache is None else part.cache + y
        return torch.as_tensor(part.cache)

    compiled = memgraph.compile(Storing(then), ROOM)
    compiled(torch.ones(2, 8)).sum().backward()
    with pytest.raises(memgraph.MemgraphError, match="differentiated before"):
        compiled(torch.ones(2, 8)).sum().backward()


def test_another_kind_of_call_reads_what_training_stores() -> None:
    def then(part: Any, y: Tensor) -> Tensor:
        if part.training:
            part.last = y.detach()
            return y
        return y - torch.as_tensor(part.last)

    torch.manual_seed(0)
    plain: Any = Storing(then)
    ours = copy.deepcopy(plain)
    compiled = memgraph.compile(ours, ROOM)
    for training in (True, False, True, False, False):
        plain.train(training)
        compiled.train(training)
        x = torch.randn(3, 8)
        assert torch.equal(compiled(x), plain(x)), training


def test_the_caller_may_put_something_else_there() -> None:
    torch.manual_seed(0)
    plain: Any = Storing(running_mean)
    ours: Any = copy.deepcopy(plain)
    compiled = memgraph.compile(ours, ROOM)
    for i in range(5):
        x = torch.randn(3, 8)
        assert torch.equal(compiled(x), plain(x))
        if i in (1, 3):
            plain.mean = ours.mean = torch.ones(8) if i == 1 else torch.ones(1, dtype=torch.float64)


def test_what_nothing_reads_is_written_whatever_is_there() -> None:
    def then(part: Any, y: Tensor) -> Tensor:
        part.width = y.shape[0]
        return y

    module: Any = Storing(then)
    compiled = memgraph.compile(module, ROOM)
    for rows, before in ((2, "x"), (2, None), (3, 3), (3, "y"), (2, 3)):
        module.width = before
        compiled(torch.ones(rows, 8))
        assert module.width == rows


def test_the_tensors_of_the_step_before_are_counted() -> None:
    module: Any = Storing(last)
    compiled = memgraph.compile(module, ROOM)
    compiled(torch.ones(100, 8)).sum().backward()
    kept = [op.nbytes for op in compiled.plan.forecast.trace.ops if op.name == "kept_attributes"]
    assert kept == [module.last.nbytes]


def test_parameters_beside_what_is_stored_are_refused() -> None:
    def then(part: Any, y: Tensor) -> Tensor:
        part.table["last"] = y.detach()
        return torch.as_tensor(part.table["layer"](y))

    module: Any = Storing(then)
    module.table["layer"] = module.body
    with pytest.raises(memgraph.CaptureError, match="table, which has parameters or modules as well"):
        memgraph.compile(module, ROOM, opaque=False)(torch.ones(2, 8))


def test_a_list_that_grows_is_refused() -> None:
    def then(part: Any, y: Tensor) -> Tensor:
        part.kept.append(y.detach())
        return y

    module = Storing(then)
    with pytest.raises(memgraph.CaptureError, match="forward changes kept, which changes its next call"):
        memgraph.compile(module, ROOM)(torch.ones(2, 8))
    assert module.kept == []
