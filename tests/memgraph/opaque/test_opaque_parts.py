"""A submodule that can't be traced runs as it is, and the step is eager's to the bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import memgraph
from memgraph.capture import trace_call

ROOM = "1GB"
WIDTH = 16
Make = Callable[[], nn.Module]


class Asking(nn.Module):
    """Reads values with numpy, which no trace can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1.0 + asked(x) % 1)


def asked(x: Tensor) -> float:
    return abs(float(x.detach().float().numpy().ravel()[0]))


class Dropping(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


class PythonNumbers(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 + random.random()) * float(np.random.rand())


class Seeding(Asking):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(int(asked(x) * 100))
        return F.dropout(super().forward(x))


class Normed(Asking):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Averaging(Asking):
    """Reads a buffer, writes to it through `.data`, and puts another in the place of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("unread", torch.zeros(3))
        self.mean: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.mean
        self.mean.data.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.count = self.count + 1
        return y + self.mean + self.count


class Frozen(Asking):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.requires_grad_(False)


class Looping(Asking):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 + int(asked(x) * 10) % 2):
            x = torch.tanh(self.linear(x))
        return x


class Recurrent(Asking):
    """Has a layer that keeps lists of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(super().forward(x)[None])[0]
        return y[0]


class Nested(nn.Module):
    """A part with parts inside; one returns a view of its argument, and so can't be opaque alone."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.view = Asking(), Viewing()

    def forward(self, x: Tensor) -> Tensor:
        return self.view(self.ask(x)).view(x.shape) * 2


class Viewing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        asked(x)
        return x.view(-1)


class Counting(Asking):
    """Changes attributes of Python, which decide what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return super().forward(x) * (1 + self.calls % 3)


class Transposed(Asking):
    """Returns a part of a larger tensor, with strides of its own."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat([super().forward(x), x], 1)
        return wide.t()[:WIDTH].t()


class Structured(Asking):
    def forward(self, x: Tensor, *, mask: Tensor, scale: float) -> dict[str, Any]:  # type: ignore[override]
        y = super().forward(x) * scale
        return {"y": y * mask, "others": [y.sum(1, keepdim=True), 3, x], "unused": y.exp()}


class Doubled(torch.autograd.Function):
    """Computes its gradient with numpy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.from_numpy(gradients[0].numpy() * 2)


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
        return y


class Net(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(self.first(x).relu())
        return self.last(F.dropout(y.relu(), 0.1, self.training)).square().mean()


class WithStructure(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        found = self.part(h, mask=(x > 0).float(), scale=0.5)
        total, count, same = found["others"]
        return self.last(found["y"] * count + total + same).square().mean()


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.part(self.first(x)))).square().mean()


class Tied(Net):
    def __init__(self) -> None:
        super().__init__(part := Dropping())
        self.last.weight = part.linear.weight


class Residual(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return (self.last(h + self.part(h)) + h).square().mean()


MODELS: dict[str, Make] = {
    "numpy": lambda: Net(Asking()),
    "dropout": lambda: Net(Dropping()),
    "numbers of Python": lambda: Net(PythonNumbers()),
    "reseeding": lambda: Net(Seeding()),
    "batch norm": lambda: Net(Normed()),
    "averages over all batches": lambda: Net(averaging_norms()),
    "buffers": lambda: Net(Averaging()),
    "frozen": lambda: Net(Frozen()),
    "numpy in backward": lambda: Net(nn.Sequential(Doubling(), nn.Linear(WIDTH, WIDTH))),
    "recurrent": lambda: Net(Recurrent()),
    "loop": lambda: Net(Looping()),
    "nested": lambda: Net(Nested()),
    "strides": lambda: Net(Transposed()),
    "structure": lambda: WithStructure(Structured()),
    "called twice": lambda: Twice(Normed()),
    "tied": Tied,
    "residual": lambda: Residual(Dropping()),
    "several": lambda: Net(nn.Sequential(Dropping(), nn.ReLU(), Averaging())),
}


def averaging_norms() -> nn.Module:
    """Return two layers that average over all batches, by a count whose value Python reads, and one that does not."""
    return nn.Sequential(*(nn.BatchNorm1d(WIDTH, momentum=momentum) for momentum in (None, 0.1, None)))


def batch(step: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))


def trained(model: Any, owner: nn.Module, steps: int = 3, accumulates: bool = False) -> list[Tensor | None]:
    """Train, and return whatever each step makes and changes."""
    optimizer = torch.optim.SGD(owner.parameters(), lr=0.1)
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    facts: list[Tensor | None] = []
    for step in range(steps):
        loss = model(batch(step))
        loss.backward()
        facts += [loss, *(p.grad for p in owner.parameters()), *owner.buffers(), *generators()]
        facts = [fact if fact is None else fact.detach().clone() for fact in facts]
        if not accumulates or step % 2:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        facts.append(model(batch(steps)))
    return [*facts, *owner.buffers(), *generators()]


def generators() -> list[Tensor]:
    numpy = torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # type: ignore[index]
    return [torch.get_rng_state(), torch.tensor(random.getstate()[1]), numpy]


def beside_eager(make: Make, budget: Any = ROOM, **given: Any) -> tuple[Any, Any, Any]:
    """Train beside eager, compare all bits, and return the compiled module, the plain one and eager's."""
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    compiled = memgraph.compile(ours, budget)
    pairs = zip(trained(theirs, theirs, **given), trained(compiled, ours, **given), strict=True)
    wrong = [i for i, (a, b) in enumerate(pairs) if (a is None) != (b is None) or (a is not None and not same(a, b))]
    assert not wrong
    for report in compiled.plans:
        assert report.measured is None or report.measured <= report.peak <= report.budget
    return compiled, ours, theirs


def same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_part_that_cannot_be_traced_trains_as_in_eager(name: str) -> None:
    compiled, _, _ = beside_eager(MODELS[name])
    assert compiled.plans[0].opaque


@pytest.mark.long
@pytest.mark.parametrize("name", ["batch norm", "tied"])
def test_gradients_accumulate_as_in_eager(name: str) -> None:
    beside_eager(MODELS[name], accumulates=True, steps=4)


def test_attributes_change_once_in_each_step_and_cause_no_capture() -> None:
    compiled, ours, theirs = beside_eager(lambda: Net(Counting()))
    assert (ours.part.calls, ours.part.seen) == (theirs.part.calls, theirs.part.seen) == (4, [1, 2, 3, 4])
    assert len(compiled.plans) == 2  # with gradients and without


def test_a_counter_alone_makes_a_part_opaque() -> None:
    class Counter(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    compiled, ours, theirs = beside_eager(lambda: Net(nn.Sequential(Counter(), nn.Linear(WIDTH, WIDTH))))
    assert [row.path for row in compiled.plan.opaque] == ["part.0"]
    assert ours.part[0].calls == theirs.part[0].calls == 4


def test_the_report_names_a_part_with_its_type_bytes_and_reason() -> None:
    compiled, _, _ = beside_eager(lambda: Net(Asking()))
    row = compiled.plans[0].opaque[0]
    assert (row.path, row.kind) == ("part", "Asking")
    assert row.nbytes > 0
    assert "numpy" in row.reason
    assert "part (Asking): workspace" in str(compiled.plans[0])


@pytest.mark.long
def test_under_autocast_casts_are_eagers_and_leave_no_bytes() -> None:
    class Cast(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    beside_eager(lambda: Cast(Looping()))


def test_a_tied_weight_under_autocast_is_left_to_the_part_around() -> None:
    compiled = memgraph.compile(Tied(), ROOM)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(memgraph.CaptureError, match=r"part \(Dropping\).*casts"):
        compiled(batch(0))


def test_parts_can_be_chosen_by_path() -> None:
    torch.manual_seed(0)
    plain = Net(nn.Linear(WIDTH, WIDTH))
    compiled = memgraph.compile(plain, ROOM, opaque=["part"])
    theirs = copy.deepcopy(plain)
    for model in (compiled, theirs):
        torch.manual_seed(1)
        model(batch(0)).backward()
    assert all(same(p.grad, q.grad) for p, q in zip(plain.parameters(), theirs.parameters(), strict=True))  # type: ignore[arg-type]
    assert [row.path for row in compiled.plan.opaque] == ["part"]
    with pytest.raises(ValueError, match="opaque has 'parts', which is no submodule"):
        memgraph.compile(plain, ROOM, opaque=["parts"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (lambda: nn.Sequential(*(Dropping() for _ in range(4))), ["part.0", "part.1", "part.2", "part.3"]),
        (averaging_norms, ["part.0", "part.2"]),
    ],
    ids=["a class of the model", "averages over all batches"],
)
def test_layers_of_one_class_are_opaque_after_one_trace(
    make: Make, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[int] = []
    trace = vars(trace_call)["trace_joint"]

    def counted(*given: Any) -> Any:
        traces.append(1)
        return trace(*given)

    monkeypatch.setattr(trace_call, "trace_joint", counted)
    compiled = memgraph.compile(Net(make()), ROOM)
    compiled(batch(0)).backward()
    assert [row.path for row in compiled.plan.opaque] == paths
    assert len(traces) == 2


def test_a_layer_of_the_same_class_that_cannot_be_opaque_is_traced() -> None:
    class Choosing(nn.Module):
        def __init__(self, asks: bool) -> None:
            super().__init__()
            self.asks = asks

        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + asked(x)) if self.asks else x.view(-1).view(x.shape)

    compiled, _, _ = beside_eager(lambda: Net(nn.Sequential(Choosing(True), Choosing(False))))
    assert [row.path for row in compiled.plan.opaque] == ["part.0"]


def test_without_opaque_parts_the_model_is_refused_with_its_line() -> None:
    with pytest.raises(memgraph.CaptureError, match="numpy"):
        memgraph.compile(Net(Asking()), ROOM, opaque=False)(batch(0))


class Packing(nn.Module):
    """A recurrent net over rows of several lengths, and functions of torch that ask for values."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.rnn(rows)[0], batch_first=True)
        return y * F.one_hot(lengths).sum() + torch.cat(torch.tensor_split(y, lengths[-1:], dim=1), 1)


class AroundPacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Packing()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.body(x, lengths)).square().mean()


def test_a_part_is_recorded_with_the_functions_that_eager_calls() -> None:
    x, lengths, found = torch.randn(3, 5, 8), torch.tensor([5, 2, 4]), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = AroundPacking()
        called = memgraph.compile(model, "1GB", opaque=["body"]) if compiled else model
        for _ in range(2):
            called(x, lengths).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))
