"""AdamW on a flat bucket in one pass: the states are read once, updated, and written once.

    adamw(parameter, gradient, exp_avg, exp_avg_sq, 3, Rule(lr=1e-3))   ->   the third step, in place

The arithmetic is torch's `foreach` one, op for op in float32, each product and each sum rounded by itself.  Kernel and
twin agree to the bit.  torch's own kernels may take a product and a sum in one rounding, so that their last bits can
be others.  What lies in bfloat16 is widened as it is read, and rounded once as it is written: to the nearest, or by
chance where a `seed` is given, without which small updates would be lost.  Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .autotune import Found, Trial, Way, launch, measured, way_of
from .formats import FORMATS, narrowed, rounded, widened
from .random_bits import SEEDS, noise, noise_of

HELD = (torch.float32, torch.bfloat16)
TENSORS = ("parameter", "gradient", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Rule:
    """The options of `torch.optim.AdamW`, as far as they are taken."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    def numbers(self, step: int) -> tuple[float, ...]:
        """What the arithmetic of a step takes, in double precision as torch computes it."""
        beta1, beta2 = self.betas
        size = -self.lr / (1 - beta1**step)
        sign = -1.0 if self.maximize else 1.0
        decay, correction = 1 - self.lr * self.weight_decay, (1 - beta2**step) ** 0.5
        return sign, decay, 1 - beta1, beta1, beta2, 1 - beta2, correction, self.eps, size


def adamw(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, rule: Rule,
    seed: int | None = None,
) -> None:  # fmt: skip
    """Update `parameter`, `exp_avg` and `exp_avg_sq` in place; `step` is 1 the first time.

    Raises:
        ValueError: the tensors are not flat, not of one length, or neither in float32 nor in bfloat16.
    """
    tensors = (parameter, gradient, exp_avg, exp_avg_sq)
    for name, x in zip(TENSORS, tensors, strict=True):
        if x.dim() != 1 or not x.is_contiguous() or x.shape != parameter.shape or x.dtype not in HELD:
            raise ValueError(f"{name} is {x.dtype}{list(x.shape)}; four flat tensors of one length are wanted, in "
                             f"{' or '.join(map(str, HELD))}")  # fmt: skip
    if step < 1 or (seed is not None and not 0 <= seed < SEEDS):
        raise ValueError(f"step={step}, seed={seed}: steps count from 1, and a seed is a number below {SEEDS}")
    adamw_by(way_of("adamw", parameter.device, sum(x.nbytes for x in tensors)), tensors, rule.numbers(step), seed)


def adamw_by(way: Way | None, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], seed: int | None = None) -> None:
    """`adamw`, in a way of the caller's choice."""
    if way is None:
        _twin(tensors, numbers, seed)
    elif count := tensors[0].numel():
        codes = [x.view({2: torch.uint16, 4: torch.uint32}[x.itemsize]) for x in tensors]
        names = (FORMATS[x.dtype].name for x in tensors)
        launch(
            _kernel, way, -(-count // way.block), tensors[0].device, *codes, count, *numbers, seed or 0, *names,
            STOCHASTIC=seed is not None,
        )  # fmt: skip


def compared(device: torch.device) -> Found:
    """Find the fastest way to update."""
    return measured("adamw", device, _trial(device))


def _twin(tensors: tuple[Tensor, ...], numbers: tuple[float, ...], seed: int | None) -> None:
    sign, decay, to_new, to_old, keep, add, correction, eps, size = numbers
    p, g, m, v = (x.float() for x in tensors)
    g = g * sign
    p = p * decay
    m = m + to_new * (g - m) if to_new < 0.5 else g - (g - m) * to_old
    v = v * keep + (add * g) * g
    # By way of float64 a root is the nearest, which torch's on a CPU is not; by a scalar a GPU would not divide.
    root = v.double().sqrt().float() / torch.full_like(v[:1], correction)
    p = p + size * (m / (root + eps))
    for stream, (x, new) in enumerate(((tensors[0], p), (tensors[2], m), (tensors[3], v))):
        chance = None
        if seed is not None and x.dtype is not torch.float32:
            chance = noise_of(stream << 60, len(x), seed, x.device)
        x.copy_(rounded(new, x.dtype, chance))


def _trial(device: torch.device) -> Trial:
    def trial(nbytes: int, way: Way | None) -> Callable[[], object]:
        tensors = tuple(torch.zeros(nbytes // 16, device=device) for _ in TENSORS)
        return partial(adamw_by, way, tensors, Rule().numbers(1))

    return trial


@triton.jit(do_not_specialize=["seed"])
def _kernel(
    parameter, gradient, exp_avg, exp_avg_sq, count,
    sign, decay, to_new, to_old, keep, add, correction, eps, size, seed,
    PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    p = widened(tl.load(parameter + i, mask=inside), PARAMETER) * decay
    g = widened(tl.load(gradient + i, mask=inside), GRADIENT) * sign
    m = widened(tl.load(exp_avg + i, mask=inside), FIRST)
    v = widened(tl.load(exp_avg_sq + i, mask=inside), SECOND)
    m = tl.where(to_new < 0.5, m + to_new * (g - m), g - (g - m) * to_old)
    v = v * keep + (add * g) * g
    p = p + size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), correction) + eps)
    _put(parameter, i, inside, p, seed, 0, PARAMETER, STOCHASTIC)
    _put(exp_avg, i, inside, m, seed, 1, FIRST, STOCHASTIC)
    _put(exp_avg_sq, i, inside, v, seed, 2, SECOND, STOCHASTIC)


@triton.jit
def _put(
    into, i, inside, x, seed,
    STREAM: tl.constexpr, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    chance = i
    if STOCHASTIC and FORMAT != "f32":
        chance = noise(i + (STREAM << 60), seed)
    tl.store(into + i, narrowed(x, chance, FORMAT, STOCHASTIC), mask=inside)
