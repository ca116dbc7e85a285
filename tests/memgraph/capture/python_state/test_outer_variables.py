"""Variables outside of a module's attributes that forward changes are refused by name, or run as they are."""

from __future__ import annotations

import copy
import gc
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.capture.capture import capture
from memgraph.guards.outer_snapshot import OuterSnapshot
from memgraph.guards.what_ran import WhatRan
from tests.support.compare import ROOM

X = torch.linspace(-1, 1, 8).view(2, 4)
CALLS = 0
COUNTS: dict[str, Any] = {"n": 0, "names": ["a"]}
SEEN: list[int] = []
LAST: Tensor | None = None
HAS_WARNED = False
SIZES: dict[Any, float] = {}
MANY = list(range(2_000))
STATE = types.SimpleNamespace(n=0)


class Model(nn.Module):
    """Scales by what it counts."""

    calls = 0
    seen: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale(x)

    def scale(self, x: Tensor) -> Any:
        return 1


class OfGlobal(Model):
    def scale(self, x: Tensor) -> Any:
        global CALLS
        CALLS += 1
        return CALLS


class OfFunction(Model):
    def scale(self, x: Tensor) -> Any:
        return count()


class OfDict(Model):
    def scale(self, x: Tensor) -> Any:
        COUNTS["n"] += 1
        return COUNTS["n"]


class OfInnerList(Model):
    def scale(self, x: Tensor) -> Any:
        COUNTS["names"].append("b")
        return len(COUNTS["names"])


class OfList(Model):
    def scale(self, x: Tensor) -> Any:
        SEEN.append(1)
        return len(SEEN)


class OfLargeList(Model):
    def scale(self, x: Tensor) -> Any:
        MANY.append(1)
        return len(MANY)


class OfObject(Model):
    def scale(self, x: Tensor) -> Any:
        STATE.n += 1
        return STATE.n


class OfClass(Model):
    def scale(self, x: Tensor) -> Any:
        type(self).calls += 1
        return self.calls


class OfBaseClass(Model):
    def scale(self, x: Tensor) -> Any:
        self.seen.append(1)
        return len(self.seen)


class OfDefault(Model):
    def scale(self, x: Tensor, seen: list[int] = []) -> Any:  # noqa: B006
        seen.append(1)
        return len(seen)


class OfMethod(Model):
    def scale(self, x: Tensor) -> Any:
        method: Any = OfMethod.scale
        method.calls = getattr(method, "calls", 0) + 1
        return method.calls


class OfTensor(Model):
    def scale(self, x: Tensor) -> Any:
        global LAST
        before, LAST = LAST, x.detach()
        return 1 if before is None else before


class OfWrappedMethod(Model):
    @torch.no_grad()
    def scale(self, x: Tensor) -> Any:
        COUNTS["n"] += 1
        return COUNTS["n"]


def count() -> int:
    global CALLS
    CALLS += 1
    return CALLS


def closed_over() -> tuple[type[Model], type[Model]]:
    calls, counts = 0, {"n": 0}

    class OfCell(Model):
        def scale(self, x: Tensor) -> Any:
            nonlocal calls
            calls += 1
            return calls

    class OfCellsDict(Model):
        def scale(self, x: Tensor) -> Any:
            counts["n"] += 1
            return counts["n"]

    return OfCell, OfCellsDict


OfCell, OfCellsDict = closed_over()
assert OfCell.scale.__closure__ is not None
CELL = OfCell.scale.__closure__[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (OfGlobal, rf"forward changes {__name__}\.CALLS \(at {__file__}:\d+ in scale\), which changes its next call"),
        (OfFunction, rf"forward changes {__name__}\.CALLS \(at {__file__}:\d+ in count\), which"),
        (OfDict, rf"forward changes {__name__}\.COUNTS \(at .* in scale\), which"),
        (OfInnerList, rf"forward changes {__name__}\.COUNTS \(at .* in scale\), which"),
        (OfWrappedMethod, rf"forward changes {__name__}\.COUNTS \(at .* in scale\), which"),
        (OfList, rf"forward changes {__name__}\.SEEN \(at .* in scale\), which"),
        (OfObject, rf"forward changes {__name__}\.STATE\.n \(at .* in scale\), which"),
        (OfClass, r"forward changes OfClass\.calls \(at .* in scale\), which"),
        (OfBaseClass, r"forward changes Model\.seen \(at .* in scale\), which"),
        (OfDefault, r"forward changes the default of seen in OfDefault\.scale \(at .* in scale\), which"),
        (OfMethod, r"forward changes OfMethod\.scale\.calls \(at .* in scale\), which"),
        (OfCell, r"forward changes the variable calls that .*OfCell\.scale closes over \(at .* in scale\), which"),
        (OfCellsDict, r"forward changes the variable counts that .*\.scale closes over \(at .* in scale\), which"),
    ],
)
@pytest.mark.parametrize("wishes", [{}, {"loss": torch.sum}, {"microbatches": 2}])
def test_what_forward_counts_elsewhere_is_refused_by_name_and_taken_back(
    make: Callable[[], Model], says: str, wishes: dict[str, Any]
) -> None:
    module = make()
    twin = copy.deepcopy(module)
    first = twin(X)  # so that variables exist
    between = state(module)
    with pytest.raises(memgraph.CaptureError, match=says):
        memgraph.compile(module, ROOM, **wishes)(X)
    assert str(state(module)) == str(between)
    assert not torch.equal(twin(X), first)  # as in eager, it goes on


def state(module: nn.Module) -> list[Any]:
    """Return what the classes above change."""
    defaults, attributes = OfDefault.scale.__defaults__, vars(OfMethod.scale)
    cells = [cell.cell_contents for kind in (OfCell, OfCellsDict) for cell in kind.scale.__closure__ or ()]
    values = CALLS, COUNTS, SEEN, STATE, type(module).__dict__.get("calls"), Model.seen, defaults, attributes, cells
    return copy.deepcopy([*values])


def test_a_tensor_that_forward_keeps_elsewhere_is_refused_and_taken_away() -> None:
    global LAST
    LAST = None
    with pytest.raises(
        memgraph.CaptureError, match=rf"forward stores a tensor in {__name__}\.LAST \(at .* in scale\), as"
    ):
        memgraph.compile(OfTensor(), ROOM)(X)
    assert LAST is None


def test_a_list_that_is_too_long_to_be_copied_is_refused_as_well() -> None:
    with pytest.raises(memgraph.CaptureError, match=rf"forward changes {__name__}\.MANY"):
        memgraph.compile(OfLargeList(), ROOM)(X)


class Warns(Model):
    def scale(self, x: Tensor) -> Any:
        global HAS_WARNED
        HAS_WARNED = HAS_WARNED or bool(x.shape)
        return 1


class Caching(Model):
    def scale(self, x: Tensor) -> Any:
        if x.shape not in SIZES:
            SIZES[x.shape] = float(x.shape[0])
        return SIZES[x.shape]


def test_a_flag_that_is_set_once_and_a_cache_that_is_filled_once_are_as_in_eager() -> None:
    global HAS_WARNED
    HAS_WARNED = False
    SIZES.clear()
    for make in (Warns, Caching):
        module = make()
        assert torch.equal(memgraph.compile(module, ROOM)(X), module(X))
    assert HAS_WARNED
    assert list(SIZES) == [X.shape]


class Layers(nn.Module):
    """A model whose layers count elsewhere; it may read the number too."""

    def __init__(self, kind: type[Model], reads: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.reads()


@pytest.mark.long
@pytest.mark.parametrize("make", [OfGlobal, OfDict, OfClass, OfCell, OfList])
def test_layers_that_count_elsewhere_run_as_they_are_and_count_as_in_eager(make: type[Model]) -> None:
    """The losses and gradients of eager, and its counts."""
    model = Layers(make)
    twin = copy.deepcopy(model)
    compiled = memgraph.compile(model, ROOM)
    begin = outer()
    found = steps(compiled)
    assert [part.path for part in compiled.plans[0].opaque] == ["layers.0", "layers.1"]
    end = outer()
    put(begin)
    expected = steps(twin)
    assert outer() == end
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def steps(model: Any) -> list[Tensor]:
    results = []
    for _ in range(3):
        model.zero_grad()
        out = model(X)
        out.sum().backward()
        results += [out.detach(), *(parameter.grad for parameter in model.parameters())]
    return results


def outer() -> list[Any]:
    return copy.deepcopy([CALLS, COUNTS, SEEN, OfClass.calls, CELL.cell_contents])


def put(values: list[Any]) -> None:
    global CALLS
    CALLS, counts, seen, OfClass.calls, CELL.cell_contents = copy.deepcopy(values)
    COUNTS.update(counts)
    SEEN[:] = seen


def test_a_number_that_a_layer_counts_and_the_model_reads_is_refused() -> None:
    with pytest.raises(memgraph.CaptureError, match=rf"forward changes {__name__}\.CALLS"):
        memgraph.compile(Layers(OfGlobal, lambda: float(CALLS)), ROOM)(X)


@pytest.mark.long
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "MixtralForCausalLM"])
def test_models_of_transformers_change_no_variable(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    config = kind.config_class(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model, tokens = kind(config), torch.randint(3, 64, (2, 8))
    before = OuterSnapshot(WhatRan(model.named_modules()))
    with before.watching():
        model(input_ids=tokens, labels=tokens)
    assert any(code.co_qualname == f"{name}.forward" for code in before.ran.codes)
    assert before.tokens
    capture(model, (), {"input_ids": tokens, "labels": tokens}, opaque=False)
    assert before.changes(OuterSnapshot(before.ran)) == ()


COLLECTED = {"times": 0}


def test_what_the_garbage_collector_calls_is_not_of_forward() -> None:
    def called(phase: str, info: Any) -> None:
        COLLECTED["times"] += 1

    class Collecting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            gc.collect()
            return super().forward(x)

    gc.callbacks.append(called)
    try:
        memgraph.compile(Collecting(4, 4), 1 << 30)(torch.ones(2, 4)).sum().backward()
        assert called in gc.callbacks
    finally:
        gc.callbacks.remove(called)
