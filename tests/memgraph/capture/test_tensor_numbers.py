"""Numbers that forward reads from tensors are data where it only computes with them, and guards where it asks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.capture.capture import capture
from memgraph.graph.summarize import summarize
from memgraph.runtime import cuda_graph_checks
from passes.schedule.schedule import Placement
from tests.support.assumed_values import assumed_values
from tests.support.faults import ROOM

Compute = Callable[["Counting", Tensor], Any]


class Counting(nn.Module):
    """Runs `compute(self, h)` on the output of a layer; `running` is a buffer that follows it."""

    running: Tensor

    def __init__(self, compute: Compute, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 5).to(dtype), nn.Linear(5, 5).to(dtype)
        self.register_buffer("running", torch.ones((), dtype=torch.float64))
        self.compute = compute
        self.noted: Any = None

    def forward(self, x: Tensor) -> Any:
        computed = self.compute(self, self.first(x))
        h, *rest = computed if isinstance(computed, tuple) else (computed,)
        return (self.last(h).float().square().mean(), *rest)


def batches(count: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 6, generator=generator).mul(1.0 + i).to(dtype) for i in range(count)]


def trained(compute: Compute, inputs: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> memgraph.CompiledModule:
    """Train beside eager; every bit has to be its own."""
    model = Counting(compute, dtype)
    eager = copy.deepcopy(model)
    compiled = memgraph.compile(model, ROOM)
    for step, x in enumerate(inputs):
        found = []
        for run, owner in ((compiled, model), (eager, eager)):
            torch.manual_seed(step)
            owner.zero_grad()
            loss, *rest = run(x)
            loss.backward()
            found.append(([loss, *(p.grad for p in owner.parameters()), *owner.buffers(), torch.get_rng_state()], rest))
        (ours, our_rest), (theirs, their_rest) = found
        for our, their in zip(ours, theirs, strict=True):
            assert (our is None) == (their is None)
            assert our is None or (our.dtype == their.dtype and same(our, their)), step
        assert repr(our_rest) == repr(their_rest)
    return compiled


def same(ours: Tensor, theirs: Tensor) -> bool:
    ours, theirs = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (ours, theirs))
    return torch.equal(ours, theirs)


def largest(h: Tensor) -> Any:
    return h.abs().max().item()


def positive(h: Tensor) -> Any:
    return (h > 0).sum().item()


def in_python(model: Counting, h: Tensor) -> Tensor:
    s, n = largest(h), positive(h)
    h = h * (1 - s) + h.cos() * s**2 / 3 - (-abs(s)) % 0.3 + (n // 2) * h - n % 3
    return h * (n / 7) - (2 * n - 1) * s + (+s // 0.25) / n


def as_an_argument(model: Counting, h: Tensor) -> Tensor:
    s, n = largest(h), positive(h)
    h = torch.add(h, h.sin(), alpha=s) - torch.sub(h, h.cos(), alpha=n) / n
    h = torch.addmm(h, h, model.last.weight, beta=s, alpha=s) + torch.addcmul(h, h, h, value=s)
    h = F.leaky_relu(torch.where(h > 0, h, s), s) + torch.full_like(h, s) + h.new_full((4, 5), n)
    return h.masked_fill(h > 100 * s, s) + s - (s / (h.exp() + s)) + h.remainder(s) + (h > n)


def clipped(model: Counting, h: Tensor) -> Tensor:
    norm = h.norm().item()
    return torch.clamp(h, max=h.max().item(), min=-largest(h)) * (1.0 / max(norm, 1e-6))


def in_place(model: Counting, h: Tensor) -> Tensor:
    total = h.detach().sum()
    s = total.item()
    total.mul_(3.0)
    h = h.clone().mul_(s)
    h[0] *= s
    return h + total * s


def running(model: Counting, h: Tensor) -> Tensor:
    scale = model.running.item()
    model.running.mul_(0.9).add_(h.detach().abs().mean(), alpha=0.1)
    return h * scale / model.running.item()


def checked(model: Counting, h: Tensor) -> Tensor:
    n = positive(h)
    if n >= 32000 or largest(h) > h.norm().item() or n + 1 < 0 or largest(h) > 1e6:
        raise ValueError("no such label")
    return h.sin()


DATA: dict[str, Compute] = {
    "computed with in Python": in_python,
    "an argument of ops": as_an_argument,
    "a clip": clipped,
    "in place": in_place,
    "a running scale": running,
    "checks": checked,
    "a truth": lambda model, h: h.sin() if h.norm() else h,
    "an integer of a float": lambda model, h: h if int(1.0 / (1.0 + largest(h))) else h.sin(),
    "a result": lambda model, h: (h * 2, {"loss": largest(h), "count": positive(h) + 1, "scale": 1.0 - largest(h)}),
    "constants beside": lambda model, h: h * torch.arange(4.0)[3].item() * largest(h),
    "a tensor that it makes": lambda model, h: h * torch.full((5,), largest(h)) + torch.scalar_tensor(positive(h)),
    "an integer tensor": lambda model, h: h * (torch.arange(5) * positive(h) // 2 - positive(h)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", DATA)
def test_a_number_that_is_computed_with_is_no_assumption(name: str) -> None:
    compiled = trained(DATA[name], batches())
    assert len(compiled.plans) == 1
    assert not [each for each in assumed_values(compiled.plan) if each.failures or each.text.startswith("the value is")]


@pytest.mark.long
@pytest.mark.parametrize("compute", [in_python, as_an_argument, in_place, running])
def test_a_number_is_the_same_whatever_is_recomputed_or_offloaded(compute: Compute, fate: Placement) -> None:
    compiled = trained(compute, batches(2))
    assert len(compiled.plans) == 1
    assert bool(compiled.plan.plan) == (fate is not Placement.KEEP)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_number_rounds_as_in_eager_whatever_it_meets(dtype: torch.dtype) -> None:
    for compute in (in_python, clipped, running):
        assert len(trained(compute, batches(dtype=dtype), dtype).plans) == 1


EXACT: dict[str, Compute] = {
    "a size": lambda model, h: h.new_zeros(positive(h) + 1, 5).sum(0) + h,
    "a size by int": lambda model, h: h + torch.zeros(int((h > 0).sum()) + 1, 5).sum(0),
    "a view": lambda model, h: h.repeat(positive(h), 1).view(positive(h), 4, 5).sum(0),
    "a slice": lambda model, h: h[: positive(h) // 5 + 1] * 2,
    "a range": lambda model, h: sum((h * i for i in range(positive(h))), h),
    "an index": lambda model, h: h * [1.0, 2.0, 3.0][positive(h) % 3],
    "a math function": lambda model, h: h * math.exp(-largest(h)) + math.sqrt(positive(h)),
    "a text": lambda model, h: h * float(f"{largest(h):.2f}"),
    "a key": lambda model, h: h * {7: 2.0, 8: 3.0}.get(positive(h), 1.0),
    "a probability": lambda model, h: F.dropout(h, 1.0 / (1.0 + largest(h))),
    "a tensor": lambda model, h: h * torch.tensor(largest(h)) + torch.tensor([positive(h), 1.0]).sum(),
    "its type": lambda model, h: h * largest(h) if type(largest(h)) is float else h,
    "a power": lambda model, h: h * 2.0 ** positive(h) + largest(h) ** 0.5,
    "many": lambda model, h: h * sum(h.detach().flatten().tolist()),
    "bits": lambda model, h: h * (positive(h) & 3) + round(largest(h), 1),
    "a step of arange": lambda model, h: h * torch.arange(0.0, largest(h) + 1.0, 0.5).sum(),
}


@pytest.mark.long
@pytest.mark.parametrize("name", EXACT)
def test_a_number_that_is_asked_for_is_guarded(name: str) -> None:
    first, second, *_ = batches()
    compiled = trained(EXACT[name], [first, second, first, second])
    assert assumed_values(compiled.plan)


def test_a_comparison_that_flips_is_captured_once_for_each_truth() -> None:
    compiled = trained(lambda model, h: h.relu() if largest(h) > 2.5 else h.sin() * largest(h), [*batches(6)] * 2)
    assert len(compiled.plans) == 2
    texts = {each.text for report in compiled.plans for each in assumed_values(report)}
    assert texts == {"v0 > 2.5 is False", "v0 > 2.5 is True"}


def test_truths_that_lead_to_fewer_questions_are_kept_beside_those_that_lead_to_more() -> None:
    def nested(model: Counting, h: Tensor) -> Tensor:
        if largest(h) > 2.5:
            return h.relu()
        return h.sin() if positive(h) > 9 else h.exp()

    few, many, *_, large = batches(6)
    assert len(trained(nested, [large, many, -many, few, large, -many]).plans) == 3


def test_zeros_of_both_signs_are_different_numbers() -> None:
    def signed(model: Counting, h: Tensor) -> Tensor:
        return h + math.copysign(1.0, (h.detach()[0, 0] * 0.0).item())

    first = batches(1)[0]
    trained(signed, [first * 9, -first * 9, first * 9])


def test_the_same_question_is_one_guard() -> None:
    compiled = trained(lambda model, h: sum((h for s in [largest(h)] for _ in range(3) if s < 1e9), h), batches(2))
    assert [each.text for each in assumed_values(compiled.plan)] == ["v0 < 1000000000.0 is True"]


def test_zeros_infinities_and_nan_are_as_in_eager() -> None:
    def scaled(model: Counting, h: Tensor) -> Tensor:
        s = h.detach()[0, 0].item()
        return torch.nan_to_num(h) * s + (1.0 - s)

    def zeroed(model: Counting, h: Tensor) -> Tensor:
        return h / (h.detach()[0, 0] * 0.0).item()

    x = torch.ones(4, 6)
    values = [x, x * math.inf, x * math.nan, x * 0.0, -x, x * 1e38]
    assert len(trained(scaled, values).plans) == 1
    assert len(trained(zeroed, values).plans) == 1


def test_a_division_by_zero_raises_as_in_eager() -> None:
    model = Counting(lambda model, h: h / (1.0 / (h > 1e6).sum().item()))
    compiled = memgraph.compile(model, ROOM)
    with pytest.raises(ZeroDivisionError):
        compiled(batches(1)[0])
    compiled(batches(1)[0] * 1e9)[0].backward()
    with pytest.raises(ZeroDivisionError):
        compiled(batches(1)[0])


def test_a_number_that_is_returned_is_refused_of_micro_batches() -> None:
    model = Counting(lambda model, h: (h, largest(h)))
    with pytest.raises(memgraph.CaptureError, match="returns a number that it reads from a tensor"):
        memgraph.compile(model, ROOM, microbatches=2, reduction="mean")(batches(1)[0])


@pytest.mark.long
def test_a_check_is_made_in_each_micro_batch() -> None:
    def check(model: Counting, h: Tensor) -> Tensor:
        return h.exp() if h.detach().max().item() > 1e6 else h.sin()

    model = Counting(check)
    compiled = memgraph.compile(model, ROOM, microbatches=2, reduction="mean")
    for x in (batches(1)[0], batches(2)[1]):
        compiled(x)[0].backward()
    assert [each.text for each in assumed_values(compiled.plan)] == ["v0 > 1000000.0 is False"] * 2


def test_a_step_that_reads_numbers_is_not_recorded() -> None:
    captured = capture(Counting(in_python), (batches(1)[0],), {})
    reason = cuda_graph_checks._reason_against(captured, captured.graph.graph, summarize(captured.graph.graph))
    assert reason == "Python reads values of tensors in it"
