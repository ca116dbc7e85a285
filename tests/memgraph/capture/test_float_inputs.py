"""Floats that change from call to call are inputs of the graph: two captures in all, and eager's bits."""

from __future__ import annotations

import copy
import logging
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memgraph
from memgraph.capture.capture import capture
from memgraph.capture.floats import float_capture
from memgraph.planning import capture_step, variants
from memgraph.runtime.step import Step

BUDGET = 100_000_000
DEFAULT = 0.5
Value = float | tuple[float, ...]


class Module(nn.Module):
    """Runs `compute(self, h, *floats)` on the output of a layer; `alpha` is an attribute."""

    def __init__(self, compute: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.other = nn.Linear(6, 5).to(dtype), nn.Linear(6, 5).to(dtype)
        self.alpha = 0.5
        self.config = {"warm": 0.25}
        self.compute = compute

    def forward(self, x: Tensor, *floats: Any, **named: Any) -> Tensor:
        return self.compute(self, self.linear(x), *floats, **named)


@dataclass
class Options:
    name: str
    scale: float


@pytest.fixture
def captures() -> Iterator[list[str]]:
    """Grows by one word for each capture: with floats as constants, or as inputs."""
    said: list[str] = []
    real = capture

    def plainly(*args: Any, **kwargs: Any) -> Any:
        said.append("constants")
        return real(*args, **kwargs)

    def openly(*args: Any, **kwargs: Any) -> Any:
        said.append("inputs")
        return real(*args, **kwargs)

    with mock.patch.object(capture_step, "capture", plainly), mock.patch.object(float_capture, "capture", openly):
        yield said


def trained(module: nn.Module, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor | None]:
    """Return output, gradients and buffers of a step."""
    module.zero_grad()
    x = x.detach().requires_grad_(x.is_floating_point())
    torch.manual_seed(7)
    out = module(x, *args, **kwargs)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters()), *module.buffers()]


def same(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and a.dtype == b.dtype and bits(a) == bits(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def bits(tensor: Tensor) -> list[int]:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return list(tensor.contiguous().view(kind).flatten().tolist())


def compared(
    compute: Callable[..., Tensor],
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    x: Tensor | None = None,
    before: Callable[[Any, int], None] | None = None,
) -> memgraph.CompiledModule:
    """Train beside eager by these calls; every bit has to be its own."""
    x = torch.linspace(-1.0, 1.0, 24).view(4, 6) if x is None else x
    ours = Module(compute, x.dtype if x.is_floating_point() else torch.float32)
    theirs = copy.deepcopy(ours)
    compiled = memgraph.compile(ours, BUDGET)
    for number, (args, kwargs) in enumerate(calls):
        for module in (ours, theirs):
            if before is not None:
                before(module, number)
        made, expected = trained(compiled, x, args, kwargs), trained(theirs, x, args, kwargs)
        assert same(made, expected), (number, args, kwargs)
    return compiled


def positional(*values: Value) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [((value if isinstance(value, tuple) else (value,)), {}) for value in values]


def scaled(module: Module, h: Tensor, scale: float) -> Tensor:
    h = torch.add(h * scale, h.sin(), alpha=scale) - scale
    h = scale - (scale / (h.exp() + scale)) / scale
    return F.leaky_relu(h.masked_fill(h > 100.0, scale), scale).clamp(max=scale * 1e3)


STEPS = [0.05 * i + 0.013 for i in range(20)]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_float_that_scales_is_captured_twice_in_twenty_steps(dtype: torch.dtype, captures: list[str]) -> None:
    x = torch.linspace(-1.0, 1.0, 24).view(4, 6).to(dtype)
    compiled = compared(scaled, positional(*STEPS), x)
    assert captures == ["constants", "inputs"]
    assert len(compiled.plans) == 1


def test_ops_that_take_a_float_in_other_ways_do_as_in_eager(captures: list[str]) -> None:
    def computed(module: Module, h: Tensor, s: float) -> Tensor:
        w = module.other.weight[:4, :5]
        h = torch.addmm(h, h @ h.t(), w, beta=s, alpha=s) + torch.addcmul(h, h, w, value=s)
        h = torch.addcdiv(h, w, h.exp(), value=s) + h.scatter(0, torch.zeros(1, 5, dtype=torch.long), s)
        h = h.index_add(0, torch.tensor([0, 1]), w[:2], alpha=s) + (torch.complex(h, w) * s).abs()
        h = h.remainder(s) + torch.div(h, s, rounding_mode="floor") + torch.threshold(h, s, s) + F.elu(h, s)
        return h.clone().mul_(s).add_(w, alpha=s) + torch.full_like(h, s) + h.new_full((4, 5), s).copysign(s) * (h > s)

    compared(computed, positional(0.5, 0.3, 0.7, -1.5, 0.25))
    assert captures == ["constants", "inputs"]


def test_a_float_that_python_computes_with_is_an_input(captures: list[str]) -> None:
    def mixed(module: Module, h: Tensor, scale: float) -> Tensor:
        return h * (1 - scale) + h.cos() * scale**2 / 3 - (-abs(scale)) % 0.3

    compared(mixed, positional(*STEPS))
    assert captures == ["constants", "inputs"]


def test_nothing_is_special_about_nan_infinity_and_zeros(captures: list[str]) -> None:
    def computed(module: Module, h: Tensor, scale: float) -> Tensor:
        return torch.where(h > 0, h * scale, scale) + h / (1.0 + scale)

    compared(computed, positional(0.5, 0.25, -0.0, 0.0, math.inf, -math.inf, math.nan, 1.0, 5e-324, 1e30))
    assert captures == ["constants", "inputs"]


@pytest.mark.long
def test_floats_come_by_position_by_name_and_inside_of_containers(captures: list[str]) -> None:
    def computed(module: Module, h: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = [*args, kwargs.get("scale", 1.0)]
        for value in given:
            inner = value["scale"] if isinstance(value, dict) else value.scale if isinstance(value, Options) else value
            h = h * (inner[1] if isinstance(inner, list) else inner)
        return h

    ways: list[Callable[[float], tuple[tuple[Any, ...], dict[str, Any]]]] = [
        lambda value: ((value,), {}),
        lambda value: ((), {"scale": value}),
        lambda value: (({"scale": [2.0, value]},), {}),
        lambda value: ((Options("warm", value),), {"scale": 3.0}),
    ]
    for way in ways:
        captures.clear()
        compared(computed, [way(value) for value in STEPS[:4]])
        assert captures == ["constants", "inputs"]


def test_attributes_that_change_between_steps_are_inputs(captures: list[str]) -> None:
    def computed(module: Module, h: Tensor, scale: float) -> Tensor:
        return h * module.alpha + module.other.weight.sum() * module.config["warm"] * scale

    def warm(module: Module, number: int) -> None:
        module.alpha, module.config["warm"] = 0.1 * number, 0.3 / (1 + number)

    compiled = compared(computed, positional(*STEPS[:8]), before=warm)
    assert captures == ["constants", "inputs"] and len(compiled.plans) == 1


def test_a_float_that_nobody_reads_makes_no_kind_of_its_own(captures: list[str]) -> None:
    def note_rate(module: Module, number: int) -> None:
        module.config["warm"] = 0.1 * number

    compared(lambda module, h: h.sin(), [((), {})] * 5, before=note_rate)
    assert captures == ["constants"]


@pytest.mark.long
@pytest.mark.parametrize(
    "compute",
    [
        lambda module, h, s: h * s if s > 0.3 else h - s,
        lambda module, h, s: h * math.exp(-s),
        lambda module, h, s: h * int(s * 10),
        lambda module, h, s: h * float(f"{s:.2f}"),
        lambda module, h, s: h * torch.tensor(s),
        lambda module, h, s: F.dropout(h, s) * s,
        lambda module, h, s: torch.bernoulli(torch.full_like(h, s)) * h if torch.full((2,), s).sum() > 1 else h * s,
        lambda module, h, s: (h.abs() + 1) ** s,
        lambda module, h, s: F.layer_norm(h, (5,), eps=s),
        lambda module, h, s: h * torch.arange(0.0, s + 1.0, 0.25).sum(),
        lambda module, h, s: h * {0.1: 1.0}.get(s, 3.0),
        lambda module, h, s: h * s if type(s) is float and s > 0.3 else h,
        lambda module, h, s: h * s if type(s) is float and s in (0.1, 0.4) else h,
        lambda module, h, s: h * s if type([s, h][0]) in (int, float) else h,
    ],
)
def test_a_float_whose_value_is_asked_for_stays_a_constant(compute: Callable[..., Tensor], captures: list[str]) -> None:
    values = (0.1, 0.2, 0.4, 0.5, 0.1)
    with pytest.warns(RuntimeWarning, match="differs from call to call"):
        compared(compute, positional(*values))
    assert captures.count("constants") == 4


def test_the_probability_of_dropout_is_eagers_at_its_ends() -> None:
    compared(lambda module, h, p: F.dropout(h, p), positional(0.0, 0.5, 1.0, 0.0, 0.25))


def test_an_attribute_whose_type_is_asked_for_stays_a_constant(captures: list[str]) -> None:
    def computed(module: Module, h: Tensor) -> Tensor:
        return h * module.alpha if type(module.alpha) is float and module.alpha > 0.3 else h

    def warm(module: Module, number: int) -> None:
        module.alpha = 0.13 * number

    compared(computed, [((), {})] * 4, before=warm)
    assert captures.count("constants") == 4


@pytest.mark.long
@pytest.mark.parametrize(
    "compute",
    [
        lambda module, h, options: h * options.scale if options.scale is DEFAULT else h,
        lambda module, h, options: h if [options.scale][0] is not DEFAULT else h.exp(),
        lambda module, h, options: h * options.scale if id(options.scale) == id(DEFAULT) else h,
        lambda module, h, options: h * options.scale if operator.is_(options.scale, DEFAULT) else h,
        lambda module, h, options: h if module.config["warm"] is not DEFAULT else h.exp(),
    ],
)
def test_a_float_whose_identity_is_checked_stays_a_constant(
    compute: Callable[..., Tensor], captures: list[str]
) -> None:
    values = (0.1, 0.2, DEFAULT, 0.3)

    def warm(module: Module, number: int) -> None:
        module.config["warm"] = values[number]

    compared(compute, [((Options("warm", value),), {}) for value in values], before=warm)
    assert captures.count("constants") == 4


def test_a_float_is_an_input_beside_checks_for_none(captures: list[str]) -> None:
    def computed(module: Module, h: Tensor, scale: float | None, other: object = None) -> Tensor:
        return h if scale is None or other is not None or (other is True) else h * scale

    compared(computed, positional(*STEPS[:4]))
    assert captures == ["constants", "inputs"]


def test_a_graph_that_differs_by_more_than_the_float_is_not_shared(captures: list[str]) -> None:
    def computed(module: Module, h: Tensor, scale: float) -> Tensor:
        return h * scale if module.asked else h + scale

    def ask(module: Module, number: int) -> None:
        module.asked = number > 0  # type: ignore[assignment]

    compared(computed, positional(0.1, 0.2, 0.3, 0.4), before=ask)
    assert captures == ["constants", "constants", "inputs"]


def test_one_float_scales_and_another_branches(captures: list[str]) -> None:
    def computed(module: Module, h: Tensor, scale: float, threshold: float) -> Tensor:
        return h * scale if threshold > 0.5 else h + scale

    values = [(step, threshold) for threshold in (0.1, 0.9) for step in STEPS[:6]]
    compared(computed, positional(*values))
    assert captures.count("constants") == 2 and captures.count("inputs") <= 3


def test_a_float_is_an_input_beside_checks_of_values(captures: list[str]) -> None:
    def computed(module: Module, h: Tensor, scale: float) -> Tensor:
        deviation = (module.other.weight.sum() * scale).exp()
        return torch.distributions.Normal(h, deviation, validate_args=True).log_prob(h.detach() + 1.0)

    compared(computed, positional(*STEPS[:12]))
    assert captures == ["constants", "inputs"]


def test_a_float_decides_a_branch_on_values(captures: list[str]) -> None:
    def computed(module: Module, h: Tensor, scale: float) -> Tensor:
        return h * scale if h.sum() < 20 * (scale - 0.5) else h.square() * scale

    compared(computed, positional(*STEPS))
    assert captures.count("constants") == 2 and captures.count("inputs") == 2


def test_branches_that_alternate_have_a_capture_with_inputs_each(captures: list[str]) -> None:
    signs = [1.0, -1.0] * 8

    def signed(module: Any, h: Tensor, scale: float) -> Tensor:
        return h * scale if module.sign > 0 else h.square() * scale

    def before(module: Any, number: int) -> None:
        module.register_buffer("sign", torch.tensor(signs[number]))

    compared(signed, positional(*STEPS[:16]), before=before)
    assert captures.count("constants") == 2 and captures.count("inputs") <= 4


def test_a_value_for_which_autograd_has_another_formula_is_captured_apart(captures: list[str]) -> None:
    def computed(module: Module, h: Tensor, alpha: float) -> Tensor:
        return torch.add(h, module.other.weight.sum() * h, alpha=alpha)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compared(computed, positional(0.5, 0.25, 1.0, 0.75, 1.0, 0.125))
    assert captures == ["constants", "inputs", "constants"]


def test_a_first_value_that_is_special_costs_one_more_capture(captures: list[str]) -> None:
    def computed(module: Module, h: Tensor, alpha: float) -> Tensor:
        return torch.add(h, module.other.weight.sum() * h, alpha=alpha)

    compared(computed, positional(1.0, 0.25, 0.5, 0.75, 0.125))
    assert captures == ["constants", "inputs", "constants", "inputs"]


def test_integers_are_scaled_by_floats(captures: list[str]) -> None:
    class Integers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, scale: float) -> Tensor:
            return x * scale * self.weight + x // scale

    ours = Integers()
    theirs, compiled = copy.deepcopy(ours), memgraph.compile(ours, BUDGET)
    for scale in STEPS[:5]:
        x = torch.arange(4)
        made, expected = trained(compiled, x, (scale,), {}), trained(theirs, x, (scale,), {})
        assert same(made, expected)
    assert captures == ["constants", "inputs"]


def test_each_backward_has_the_float_of_its_own_forward() -> None:
    ours = Module(scaled)
    theirs, compiled = copy.deepcopy(ours), memgraph.compile(ours, BUDGET, forwards=2)
    x = torch.ones(4, 6)
    for values in ((0.5, 0.25), (0.125, 0.3), (0.7, 0.9)):
        for module in (compiled, theirs):
            module.zero_grad()
            first, second = (module(x, value) for value in values)
            second.sum().backward()
            first.sum().backward()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        assert all(a.grad is b.grad or torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def test_gradients_that_are_there_take_no_further_capture(captures: list[str]) -> None:
    ours = Module(scaled)
    theirs, compiled = copy.deepcopy(ours), memgraph.compile(ours, BUDGET)
    x = torch.ones(4, 6)
    for number, value in enumerate(STEPS[:9]):
        for module in (compiled, theirs):
            if number % 3 == 0:
                module.zero_grad()
            module(x, value).sum().backward()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        assert all(a.grad is b.grad or torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]
    assert captures == ["constants", "inputs"] and len(compiled.plans) == 2


@pytest.mark.long
def test_a_plan_that_recomputes_reads_the_float_of_its_call(captures: list[str]) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: Tensor, scale: float) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x) * scale) / (1 - scale)
            return x.sum()

    ours, x = Deep(), torch.randn(512, 64)
    theirs = copy.deepcopy(ours)
    plain = memgraph.plan(ours, x, 0.5, budget=BUDGET)
    compiled = memgraph.compile(ours, int(plain.peak * 0.7), offload=None, time_limit=0.5)
    for scale in STEPS[3:9]:
        made, expected = trained(compiled, x, (scale,), {}), trained(theirs, x, (scale,), {})
        assert same(made, expected)
        assert compiled.plan.measured is not None and compiled.plan.measured <= compiled.plan.peak
    assert compiled.plan.plan and captures.count("constants") == 2  # one of them is `memgraph.plan`'s


def test_a_function_of_pythons_keeps_the_float_for_its_backward(captures: list[str]) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
            ctx.scale = scale
            return x * scale

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0] * ctx.scale, None

    compared(lambda module, h, s: Scale.apply(h, s), positional(*STEPS[:5]))  # type: ignore[no-untyped-call]
    assert captures == ["constants", "inputs"]


def test_a_float_that_forward_keeps_elsewhere_is_refused_and_what_it_kept_is_dropped() -> None:
    seen: list[Any] = []

    def computed(module: Module, h: Tensor, scale: float) -> Tensor:
        seen.append(scale)
        return h * scale

    with pytest.raises(
        memgraph.CaptureError, match=r"forward changes .*seen .*\(at .*test_float_inputs\.py:\d+ in computed"
    ):
        memgraph.compile(Module(computed), BUDGET)(torch.ones(2, 6), 0.1)
    assert seen == []


def test_a_float_that_forward_returns_is_the_calls_own() -> None:
    class Returns(Module):
        def forward(self, x: Tensor, scale: float) -> Any:
            return {"loss": self.linear(x).sum() * scale, "scale": scale}

    compiled = memgraph.compile(Returns(scaled), BUDGET)
    for scale in (0.1, 0.2, 0.3):
        assert compiled(torch.ones(2, 6), scale)["scale"] == scale


def test_a_float_that_fails_in_python_fails_as_in_eager() -> None:
    compiled = memgraph.compile(Module(lambda module, h, s: h * (1.0 / s)), BUDGET)
    for scale in (0.5, 0.25):
        compiled(torch.ones(2, 6), scale).sum().backward()
    with pytest.raises(ZeroDivisionError):
        compiled(torch.ones(2, 6), 0.0)
    compiled(torch.ones(2, 6), 0.125).sum().backward()


def test_why_a_float_stays_a_constant_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memgraph")
    compared(lambda module, h, s: h * math.exp(s), positional(0.1, 0.2))
    (said,) = [record.getMessage() for record in caplog.records if "stay constants" in record.getMessage()]
    assert "__float__" in said and "test_float_inputs.py" in said


def test_a_step_that_updates_parameters_keeps_floats_as_constants(captures: list[str]) -> None:
    ours = Module(lambda module, h, s: (h * s).sum())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    compiled = memgraph.compile(ours, BUDGET, optimizer=optimizer, fuse_update=True)
    for scale in (0.1, 0.2, 0.3):
        compiled(torch.ones(2, 6), scale).backward()
        optimizer.step()
    assert captures == ["constants"] * 3


def test_a_step_of_plain_floats_is_given_none() -> None:
    with mock.patch.object(Step, "__call__", autospec=True, side_effect=Step.__call__) as called:
        compared(scaled, positional(0.5, 0.5, 0.25, 0.25))
    assert [len(call.args[3]) > 0 for call in called.call_args_list] == [False, False, True, True]


@pytest.mark.long
def test_a_dropped_step_with_floats_is_not_captured_again(captures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "PLANS", 1)
    monkeypatch.setattr(variants, "NODES", 0)
    ours = Module(scaled)
    theirs, compiled = copy.deepcopy(ours), memgraph.compile(ours, BUDGET)
    for value in STEPS[:2]:
        trained(compiled, torch.ones(4, 6), (value,), {})
    for value in STEPS[2:6]:
        for rows in (4, 3):
            x = torch.ones(rows, 6)
            assert same(trained(compiled, x, (value,), {}), trained(theirs, x, (value,), {}))
    assert captures == ["constants", "inputs"] * 2
