"""An update in one pass gives the bits of its twin, and but for last bits what `torch.optim.AdamW` gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memgraph.kernels.adamw import Rule, adamw, adamw_by
from memgraph.kernels.autotune import Way
from tests.support.numbers import DEVICE, WAY, hard, same

F32, BF16 = torch.float32, torch.bfloat16
Held = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]
RULES = (Rule(), Rule(0.1, (0.3, 0.5), 1e-3, 0.0, True), Rule(3e-4, (0.95, 0.99), 1e-6, 0.1))


def trained(way: Way | None, count: int, held: Held, rule: Rule, seed: int | None, steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    parameter = torch.randn(count, generator=generator).to(DEVICE, held[0])
    states = [torch.zeros(count, dtype=dtype, device=DEVICE) for dtype in held[2:]]
    for step in range(1, steps + 1):
        gradient = torch.randn(count, generator=generator).to(DEVICE, held[1])
        adamw_by(way, (parameter, gradient, *states), rule.numbers(step), seed)
    return [parameter, *states]


@pytest.mark.parametrize("seed", [None, 6])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("held", [(F32, F32, F32, F32), (BF16, BF16, F32, F32), (BF16, F32, BF16, BF16)], ids=str)
def test_a_kernel_updates_as_its_twin(held: Held, rule: Rule, seed: int | None) -> None:
    for count in (0, 1, 1024, 2100):
        ours, theirs = trained(WAY, count, held, rule, seed), trained(None, count, held, rule, seed)
        assert all(map(same, ours, theirs))


def test_odd_numbers_are_updated_as_by_the_twin() -> None:
    ours = [hard(2000), hard(2000).flip(0), hard(2000).roll(7), hard(2000).abs().roll(3)]
    theirs = [x.clone() for x in ours]
    adamw_by(WAY, tuple(ours), Rule().numbers(2))
    adamw_by(None, tuple(theirs), Rule().numbers(2))
    assert all(map(same, ours, theirs))


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}, {}], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_but_for_last_bits_it_is_torchs_own(rule: Rule, how: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    ours = torch.randn(1500, generator=generator).to(DEVICE)
    states = torch.zeros_like(ours), torch.zeros_like(ours)
    theirs = torch.nn.Parameter(ours.clone())
    options: dict[str, Any] = {"lr": rule.lr, "betas": rule.betas, "eps": rule.eps, "weight_decay": rule.weight_decay}
    optimizer = torch.optim.AdamW([theirs], maximize=rule.maximize, **options, **how)
    for step in range(1, 6):
        theirs.grad = torch.randn(1500, generator=generator).to(DEVICE)
        adamw_by(WAY, (ours, theirs.grad, *states), rule.numbers(step))
        optimizer.step()
    # Five steps, each of which rounds a parameter three times: by 2 ** -24 of itself, or of a step of this size.
    torch.testing.assert_close(ours, theirs.detach(), rtol=15 * 2.0**-24, atol=15 * 2.0**-24 * 4 * rule.lr)
    torch.testing.assert_close(states[0], optimizer.state[theirs]["exp_avg"], rtol=0, atol=15 * 2.0**-24 * 4)
    torch.testing.assert_close(states[1], optimizer.state[theirs]["exp_avg_sq"], rtol=15 * 2.0**-24, atol=0)


def test_chance_keeps_updates_that_the_nearest_would_lose() -> None:
    rule = Rule(lr=1e-4, weight_decay=0.0)
    for seed, moved in ((None, False), (3, True)):
        parameter = torch.ones(3000, dtype=BF16, device=DEVICE)
        states = torch.zeros(3000, device=DEVICE), torch.zeros(3000, device=DEVICE)
        for step in range(1, 6):
            adamw_by(WAY, (parameter, torch.ones_like(parameter), *states), rule.numbers(step), seed)
        mean = parameter.double().mean().item()
        assert (abs(mean - (1 - 5e-4)) < 1e-4) if moved else mean == 1.0


def test_what_cannot_be_updated_is_refused() -> None:
    x = torch.zeros(4, device=DEVICE)
    with pytest.raises(ValueError, match=r"exp_avg is torch\.float16"):
        adamw(x, x, x.half(), x, 1, Rule())
    with pytest.raises(ValueError, match=r"gradient is .*one length"):
        adamw(x, x[:2], x, x, 1, Rule())
    with pytest.raises(ValueError, match="steps count from 1"):
        adamw(x, x, x, x, 0, Rule())
