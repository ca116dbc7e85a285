"""On a GPU: values have the addresses of the plan, the allocator holds little more than they take, and bits are eager's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from benchmarks.blocks import SHAPES, Stack
from memgraph.report.report import ARENA

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
CUDA = torch.device("cuda", 0)
MB = 1 << 20


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Eager gives the same bits twice."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def subject(name: str) -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    shape = replace(SHAPES[name], blocks=4, width=512, heads=8, length=256, batch=8)
    with CUDA:
        return Stack(replace(shape, inner=1376 if shape.inner else 0)), torch.randn(8, 256, 512)


def trained(model: nn.Module, called: Any, x: Tensor, steps: int = 8) -> list[Tensor]:
    """Losses and gradients of some steps."""
    facts = []
    for step in range(steps):
        loss = called(x * (step + 1))
        loss.backward()
        facts += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
        model.zero_grad(set_to_none=True)
    return facts


def compiled(name: str, share: float = 0.4) -> tuple[Stack, Any, Tensor]:
    """Return a model and its compiled module, for a share of the bytes that a plain step allocates."""
    model, x = subject(name)
    free = memgraph.plan(model, x, budget="16GB", lower=None)
    there = sum(op.nbytes for op in free.forecast.trace.ops if op.is_input)
    return model, memgraph.compile(model, there + int(share * (free.peak - there)), lower=None), x


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("share", [0.6, 0.4])
def test_a_step_in_an_arena_is_eagers_and_little_is_lost(name: str, share: float) -> None:
    (plain, x), (model, ours, _) = subject(name), compiled(name, share)
    found, expected = trained(model, ours, x), trained(plain, plain, x)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert ours.plan.arena == ARENA
    ours._latest.arena.end()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    trained(model, ours, x, 1)  # which makes the block: for a moment all of it counts as allocated
    torch.cuda.reset_peak_memory_stats()
    trained(model, ours, x, 3)
    allocated, reserved = torch.cuda.max_memory_allocated() - before[0], torch.cuda.max_memory_reserved() - before[1]
    small = torch.cuda.memory_stats()["reserved_bytes.small_pool.peak"]
    assert reserved <= 1.01 * allocated + small, (allocated, reserved, small)


def test_gradients_that_are_held_leave_the_arena() -> None:
    (plain, x), (model, ours, _) = subject("gpt2-xl"), compiled("gpt2-xl")
    trained(model, ours, x, 6)
    assert ours.plan.arena == ARENA
    held: list[Any] = []
    expected: list[Any] = []
    for called, into in ((ours, held), (plain, expected)):
        for step in range(8):
            called(x * (step + 1)).backward()
            own = model if called is ours else plain
            into += [p.grad for p in own.parameters()]
            own.zero_grad(set_to_none=True)
    assert all(map(torch.equal, held, expected))
    assert "are held when another one begins" in ours.plan.arena


def test_a_request_that_was_not_noted_leaves_the_arena() -> None:
    (plain, x), (model, ours, _) = subject("gpt2-xl"), compiled("gpt2-xl")
    trained(model, ours, x, 6)
    arena = ours._latest.arena
    forward = arena.halves[0]
    code = arena._code[forward]

    def larger(half: Any, values: Any) -> Any:
        other = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
        del other
        return code(half, values)

    arena._code[forward] = larger
    assert all(map(torch.equal, trained(model, ours, x, 3), trained(plain, plain, x, 3)))
    assert "other memory than" in ours.plan.arena


def test_another_step_has_the_memory_of_the_arena() -> None:
    model, ours, x = compiled("gpt2-xl")
    trained(model, ours, x, 6)
    block = ours._latest.arena._block
    with_arena, nbytes = torch.cuda.memory_reserved(), block.end - block.begin
    del block
    with torch.no_grad():
        ours(x[:1])
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= with_arena - nbytes + 40 * MB
    plain, _ = subject("gpt2-xl")
    assert all(map(torch.equal, trained(model, ours, x, 3), trained(plain, plain, x, 3)))
