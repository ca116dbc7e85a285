"""Nothing goes on in silence: what is done to a compiled module, around it or to its budget goes right or is an error."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.profile.memory_meter import measure_peak, resident_bytes
from memgraph.system.page_pool import why_not

Change = Callable[[nn.Module], object]
Wrap = Callable[[memgraph.CompiledModule], Callable[[Tensor], Tensor]]
ROOM = 1 << 30


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(torch.tanh(self.middle(nn.functional.gelu(self.first(x)))))
        return hidden.square().mean()


class Threefold(Net):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def batch(rows: int = 1024) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def scaled(model: nn.Module) -> dict[str, Tensor]:
    return {name: 1.5 * value for name, value in model.state_dict().items()}


def plain_peak() -> int:
    return memgraph.plan(Net(), batch(), budget=ROOM).peak


@pytest.fixture(scope="module")
def tight() -> int:
    """Return a budget that takes a plan."""
    return int(0.8 * plain_peak())


def rebind(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = 1.5 * parameter.data


def shift(module: nn.Module, name: str, change: Callable[[Any], Any]) -> None:
    setattr(module, name, change(getattr(module, name)))


def twice(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: 2 * forward(x)


def double_middle(model: nn.Module) -> None:
    shift(model.get_submodule("middle"), "forward", twice)


def freeze(model: nn.Module) -> None:
    model.get_submodule("first").requires_grad_(False)


def swap(model: nn.Module) -> None:
    weight = model.get_parameter("last.weight")
    torch.utils.swap_tensors(weight, nn.Parameter(2 * weight.detach()))


def other_layer(model: nn.Module) -> None:
    model.middle = nn.Linear(256, 256, bias=False)
    nn.init.constant_(model.middle.weight, 0.01)


CHANGES: dict[str, Change] = {
    "p.data =": rebind,
    "module.weight =": lambda model: shift(
        model.get_submodule("middle"), "weight", lambda w: nn.Parameter(1.5 * w.detach())
    ),
    "load_state_dict": lambda model: model.load_state_dict(scaled(model)),
    "load_state_dict(assign)": lambda model: model.load_state_dict(scaled(model), assign=True),
    "bfloat16()": lambda model: model.bfloat16(),
    "share_memory()": lambda model: model.share_memory(),
    "eval()": lambda model: model.eval(),
    "model.forward =": lambda model: shift(model, "forward", twice),
    "layer.forward =": double_middle,
    "layer =": other_layer,
    "__class__ =": lambda model: setattr(getattr(model, "_module", model), "__class__", Threefold),
    "forward hook": lambda model: model.get_submodule("middle").register_forward_hook(lambda *given: 2 * given[2]),
    "forward pre-hook": lambda model: model.register_forward_pre_hook(lambda _, given: (2 * given[0],)),
    "requires_grad_": freeze,
    "weight_norm": lambda model: nn.utils.parametrizations.weight_norm(model.get_submodule("middle")),
    "swap_tensors": swap,
}


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def outcome(compiled: Any, model: nn.Module, eager: nn.Module, call: Callable[[Tensor], Tensor], budget: int) -> str:
    """Take steps, and return what has happened: "right", the type of an error of memgraph, or what is wrong."""
    x = batch().to(next(eager.parameters()).dtype)
    expected = eager(x)
    expected.backward()
    try:
        for step in range(2):
            model.zero_grad()

            def train() -> Tensor:
                loss = call(x)
                loss.backward()
                return loss.detach()

            # The first of these steps may be planned in; what planning takes has tests of its own.
            loss, allocated = (train(), None) if step == 0 else measure_peak(train)
            pairs = zip(model.parameters(), eager.parameters(), strict=True)
            if not is_same(loss, expected.detach()) or not all(is_same(a.grad, b.grad) for a, b in pairs):
                return "other numbers"
            if allocated is not None and resident_bytes([*model.parameters(), x]) + allocated.peak > budget:
                return "over the budget"
    except memgraph.MemgraphError as error:
        return type(error).__name__
    return "right"


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_a_step_is_trained_within_the_budget(change: str, tight: int) -> None:
    model, eager = Net(), Net()
    compiled = memgraph.compile(model, tight)
    compiled(batch()).backward()
    for each in (eager, compiled):
        CHANGES[change](each)
    found = outcome(compiled, model, eager, compiled, tight)
    assert found == "right"


def reloaded(compiled: memgraph.CompiledModule) -> memgraph.CompiledModule:
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    again: memgraph.CompiledModule = torch.load(file, weights_only=False)
    return again


def compiled_in_place(compiled: memgraph.CompiledModule) -> memgraph.CompiledModule:
    compiled.compile(backend="eager")
    return compiled


COPIES: dict[str, Callable[[memgraph.CompiledModule], memgraph.CompiledModule]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda compiled: pickle.loads(pickle.dumps(compiled)),
    "torch.save": reloaded,
}
WRAPS: dict[str, Wrap] = {
    "DataParallel": nn.DataParallel,
    "Sequential": nn.Sequential,
    "torch.compile": lambda compiled: torch.compile(compiled, backend="eager"),
    "compile()": compiled_in_place,
    "functional_call": lambda compiled: (
        lambda x: torch.func.functional_call(compiled, dict(compiled.named_parameters()), x)
    ),
    "checkpoint": lambda compiled: lambda x: torch.utils.checkpoint.checkpoint(compiled, x, use_reentrant=False),
    "forward": lambda compiled: compiled.forward,
}


@pytest.mark.long
@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_trains_within_the_budget(copied: str, tight: int) -> None:
    compiled = memgraph.compile(Net(), tight)
    compiled(batch()).backward()
    compiled.zero_grad()
    again = COPIES[copied](compiled)
    assert outcome(again, again, Net(), again, tight) == "right"


@pytest.mark.long
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_wrapped_module_trains_within_the_budget(wrap: str, tight: int) -> None:
    model = Net()
    compiled = memgraph.compile(model, tight)
    assert outcome(compiled, model, Net(), WRAPS[wrap](compiled), tight) == "right"
    assert compiled.plan.plan


@pytest.mark.parametrize("wrap", [torch.jit.trace, torch.export.export], ids=["trace", "export"])
def test_what_can_not_follow_a_compiled_module_is_refused(wrap: Callable[..., object], tight: int) -> None:
    with pytest.raises(memgraph.MemgraphError, match="give them the plain module"):
        wrap(memgraph.compile(Net(), tight), (batch(),))


def loss_of(result: Tensor) -> Tensor:
    return 2 * result


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "loss": {"loss": loss_of},
    "offload": {"offload": None},
    "time_limit": {"time_limit": 0},
    "wire_dtype": {"wire_dtype": torch.bfloat16},
    "microbatches": {"microbatches": 2, "reduction": "mean"},
    "accumulate": {"accumulate": True},
    "forwards": {"forwards": 2},
    "opaque": {"opaque": ["middle"]},
    "slices": {"slices": "auto"},
    "fuse_update": {"fuse_update": True},
}


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS)
def test_a_budget_that_can_not_be_kept_is_refused_before_the_first_step_and_the_smallest_is_kept(option: str) -> None:
    def given(model: nn.Module) -> dict[str, Any]:
        return {"optimizer": torch.optim.AdamW(model.parameters()), "time_limit": 2, **OPTIONS[option]}

    model, few = Net(), batch(256)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(memgraph.BudgetError) as planned:
        memgraph.plan(model, few, budget=100_000, **given(model))
    with pytest.raises(memgraph.BudgetError) as called:
        memgraph.compile(model, 100_000, **given(model))(few)
    assert all(p.grad is None and torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    smallest = max(planned.value.smallest, called.value.smallest)
    compiled = memgraph.compile(model, smallest, **given(model))
    for _ in range(2):
        compiled(few).backward()
        compiled.optimizer.step()
        compiled.optimizer.zero_grad()
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak <= smallest


@pytest.mark.long
def test_a_sweep_says_which_budgets_can_not_be_kept() -> None:
    peak = plain_peak()
    found = memgraph.sweep(Net(), batch(), budgets=[100_000, peak], time_limit=2)
    assert [(point.budget, point.fits) for point in found.points] == [(peak, True), (100_000, False)]
    assert 100_000 < found.smallest <= peak


class Joint(nn.Module):
    """Its logits are 125 times as wide as what it reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 2000)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.layer(x)[0])
        return logits


def of_logits(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().mean()


@pytest.mark.skipif(why_not() != "", reason="without a pool of pages nothing counts what the caller allocates")
def test_a_loss_of_the_callers_that_exceeds_the_budget_is_said_with_its_bytes() -> None:
    x = torch.randn(4, 50, 16)
    budget = memgraph.plan(Joint(), x, budget=ROOM).peak
    model, roomy = (memgraph.compile(Joint(), nbytes, accumulate=False) for nbytes in (budget, 4 * budget))
    with pytest.warns(RuntimeWarning, match=f"as a loss outside of the model, takes .* over its budget of {budget}"):
        of_logits(model(x)).backward()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once, and not where there is room
        of_logits(model(x)).backward()
        of_logits(roomy(x)).backward()
    assert model.plan.measured is not None and model.plan.measured <= budget


def test_a_loss_in_the_plan_is_not_said_to_be_outside() -> None:
    x = torch.randn(4, 50, 16)
    budget = memgraph.plan(Joint(), x, budget=ROOM, loss=of_logits).peak
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memgraph.compile(Joint(), budget, loss=of_logits, accumulate=False)(x).backward()
