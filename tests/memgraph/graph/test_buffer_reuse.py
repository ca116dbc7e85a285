"""Ops that write into the memory of dead values give the bits that they give in their own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memgraph
from memgraph.graph.halves import buffer_reuse
from memgraph.graph.halves.buffer_reuse import _keyword, _overload
from passes.schedule.buffer_reuse import reused_buffers
from tests.support.promise import trial
from tests.support.sampled_ops import modules_of, ops
from tests.support.zoo import CASES, Case


class _InMemory(TorchDispatchMode):
    """Runs each op that can write into given memory a second time, into memory of the layout of its result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wrong: set[str] = set()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        into = _overload(op)
        if into is not None and isinstance(result, Tensor) and not result.dtype.is_complex:
            self.seen.add(str(op))
            if not self._is_right(into, args, kwargs or {}, result):
                self.wrong.add(f"{op} {tuple(result.shape)}")
        return result

    def _is_right(self, into: Any, args: Any, kwargs: Any, result: Tensor) -> bool:
        memory = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype).fill_(1)
        try:
            given = into(*args, **kwargs, **{_keyword(into): memory})
        except Exception:  # samples that fail are caught below, and this is none
            return False
        return given is memory and given.stride() == result.stride() and torch.equal(_bits(given), _bits(result))


def _bits(x: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    return x.contiguous().view(integer)


def _runs(mode: _InMemory) -> Iterator[None]:
    for name in ops():
        for module, tensors in modules_of(name, 2):
            try:
                results = [x for x in tree_leaves(module(*tensors)) if isinstance(x, Tensor) and x.requires_grad]
                if results:
                    torch.autograd.backward(results, [torch.ones_like(x) for x in results])
            except Exception:  # not on a CPU, or no second derivative
                continue
            yield


def test_each_op_of_torch_gives_the_same_bits_in_given_memory() -> None:
    with torch.random.fork_rng(), _InMemory() as mode:
        ran = sum(1 for _ in _runs(mode))
    assert not mode.wrong, "\n".join(sorted(mode.wrong))
    assert ran > 300 and len(mode.seen) > 100, (ran, len(mode.seen))


@pytest.fixture
def reused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets values of any size be reused, and returns how many are, step by step."""
    counts: list[int] = []

    def counted(*args: Any) -> dict[str, str]:
        found = reused_buffers(*args)
        counts.append(len(found))
        return found

    monkeypatch.setattr(buffer_reuse, "RETURNED", 1)
    monkeypatch.setattr(buffer_reuse, "reused_buffers", counted)
    return counts


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("gpt2", "unet", "llama")], ids=lambda case: case.name
)
def test_steps_keep_their_bits_and_bytes(case: Case, reused: list[int]) -> None:
    result = trial(case, 0.6)
    assert result.equal and result.measured <= result.forecast <= result.budget
    assert reused[-1] > 5


class _Two(nn.Module):
    """Two outputs, each through layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
        self.second = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x).square().mean(), self.second(self.first(x))


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_loss_of_some_outputs_needs_no_memory_of_the_others(used: tuple[int, ...], reused: list[int]) -> None:
    torch.manual_seed(0)
    model, x = _Two(), torch.randn(256, 64)
    twin = copy.deepcopy(model)
    compiled = memgraph.compile(model, memgraph.plan(model, x, budget=None).peak * 3 // 4)
    for _ in range(3):
        for each, called in ((model, compiled), (twin, twin)):
            each.zero_grad()
            outputs = called(x)
            sum((outputs[i].square().sum() for i in used), torch.zeros(())).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            if ours.grad is None or theirs.grad is None:
                assert ours.grad is theirs.grad
            else:
                assert torch.equal(ours.grad, theirs.grad)
    assert reused[-1] > 5
