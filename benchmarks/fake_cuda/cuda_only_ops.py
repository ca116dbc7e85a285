"""Ops that CUDA has and the CPU has not, on tensors of the host.

_scaled_dot_product_efficient_attention(q, k, v, bias, ...)   ->   softmax(q k^T / sqrt(d) + bias) v, and its seeds
cudnn_batch_norm(x, ...)                                      ->   native_batch_norm(x, ...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import recurrent_ops
from .host_draws import drawing, next_seed
from .host_tensors import OnHost

aten = torch.ops.aten


@dataclass(frozen=True)
class Attention:
    """Attention of tensors of the host: [batch, heads, length, width]."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    seed: int

    @property
    def factor(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the result and the logarithms of the sums of exponentials."""
        weights, kept, sums = self._weights()
        return _by_position((weights * kept) @ self._heads(self.value), self.query), sums

    def backward(self, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of query, key, value and bias."""
        weights, kept, _ = self._weights()
        gradient = gradient.float()
        of_weights = gradient @ self._heads(self.value).mT * kept
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        return (
            _by_position(of_scores @ self._heads(self.key) * self.factor, self.query),
            _by_position(self._summed(of_scores.mT @ self.query.float() * self.factor), self.key),
            _by_position(self._summed((weights * kept).mT @ gradient), self.value),
            None if self.bias is None else of_scores.to(self.bias.dtype),
        )

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights, what dropout multiplies them by, and the logarithms of the sums."""
        scores = self.query.float() @ self._heads(self.key).mT * self.factor
        if self.bias is not None:
            scores = scores + self.bias.float()
        if self.is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        sums = scores.logsumexp(-1, keepdim=True)
        kept = torch.ones(())
        if self.dropout:
            with drawing(self.seed):
                kept = (torch.rand(scores.shape) >= self.dropout).float() / (1 - self.dropout)
        return (scores - sums).exp(), kept, sums.squeeze(-1)

    def _heads(self, value: Tensor) -> Tensor:
        """Return a key or a value for each head of the query."""
        return value.float().repeat_interleave(self.query.shape[1] // value.shape[1], 1)

    def _summed(self, gradient: Tensor) -> Tensor:
        return gradient.unflatten(1, (self.key.shape[1], -1)).sum(2)


def _by_position(value: Tensor, like: Tensor) -> Tensor:
    """Return a result with the type of `like`, and all heads of a position together, as kernels of CUDA lay it out."""
    return value.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, with_sums: bool, dropout: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None,
) -> Sequence[Any]:  # fmt: skip
    seed = next_seed() if dropout else 0
    results = Attention(query, key, value, bias, dropout, is_causal, scale, seed).forward()
    return *results, *(torch.tensor(number).as_subclass(OnHost) for number in (seed, 0))


def _efficient_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor,
    seed: Tensor, offset: Tensor, dropout: float, wanted: Sequence[bool], is_causal: bool = False, *,
    scale: float | None = None,
) -> Sequence[Any]:  # fmt: skip
    attention = Attention(query, key, value, bias, dropout, is_causal, scale, int(seed))
    return tuple(
        each if is_wanted else None for each, is_wanted in zip(attention.backward(gradient), wanted, strict=True)
    )


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = False,
    with_mask: bool = False, *, scale: float | None = None,
) -> Sequence[Any]:  # fmt: skip
    seed = next_seed() if dropout else 0
    results = Attention(query, key, value, None, dropout, is_causal, scale, seed).forward()
    draw = torch.tensor([seed, 0]).to(torch.uint64)
    return *results, None, None, query.shape[2], key.shape[2], draw, torch.empty(0), torch.empty(0, dtype=query.dtype)


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, ends_q: None, ends_k: None,
    most_q: int, most_k: int, dropout: float, is_causal: bool, draw: Tensor, unused: Tensor, *,
    scale: float | None = None,
) -> Sequence[Any]:  # fmt: skip
    seed, _ = draw.tolist()
    return Attention(query, key, value, None, dropout, is_causal, scale, seed).backward(gradient)[:3]


def _cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, with_sums: bool, dropout: float = 0.0,
    is_causal: bool = False, with_mask: bool = False, *, scale: float | None = None,
) -> Sequence[Any]:  # fmt: skip
    seed = next_seed() if dropout else 0
    result, sums = Attention(query, key, value, bias, dropout, is_causal, scale, seed).forward()
    draw = torch.tensor(seed), torch.tensor(0)
    return result, sums.unsqueeze(-1), None, None, query.shape[2], key.shape[2], *draw, None


def _cudnn_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, bias: Tensor | None, ends_q: None, ends_k: None, most_q: int, most_k: int, dropout: float,
    is_causal: bool, *, scale: float | None = None,
) -> Sequence[Any]:  # fmt: skip
    return Attention(query, key, value, bias, dropout, is_causal, scale, int(seed)).backward(gradient)[:3]


def _cudnn_batch_norm(*args: Any) -> Sequence[Any]:
    return *aten.native_batch_norm.default(*args), torch.empty(0, dtype=torch.uint8)


def _cudnn_batch_norm_backward(
    x: Tensor, gradient: Tensor, weight: Tensor, mean: Tensor | None, variance: Tensor | None, of_mean: Tensor | None,
    of_variance: Tensor | None, eps: float, reserve: Tensor,
) -> Sequence[Any]:  # fmt: skip
    facts = mean, variance, of_mean, of_variance
    return aten.native_batch_norm_backward.default(gradient, x, weight, *facts, True, eps, [True, True, True])


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Sequence[Any]:
    squares = x.float().square().mean(tuple(range(-len(shape), 0)), keepdim=True)
    inverse = (squares + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    result = x.float() * inverse * (1 if weight is None else weight.float())
    return result.to(x.dtype), inverse


def _rms_norm_backward(
    gradient: Tensor, x: Tensor, shape: Sequence[int], inverse: Tensor, weight: Tensor | None, wanted: Sequence[bool]
) -> Sequence[Any]:
    dims, normed = tuple(range(-len(shape), 0)), x.float() * inverse
    of_normed = gradient.float() * (1 if weight is None else weight.float())
    of_x = inverse * (of_normed - normed * (of_normed * normed).mean(dims, keepdim=True))
    of_weight = (gradient.float() * normed).sum(tuple(range(x.ndim - len(shape))))
    found = of_x.to(x.dtype), None if weight is None else of_weight.to(weight.dtype)
    return tuple(each if is_wanted else None for each, is_wanted in zip(found, wanted, strict=True))


def _histogram(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Count whole numbers too, as routed experts do."""
    counts: Tensor = aten.histc.default(x.float(), *args, **kwargs)
    return counts.to(x.dtype)


def _uses_no_library(*args: Any) -> bool:
    """Leave a CTC loss to torch's own kernels, as CUDA does for targets of int64."""
    return False


CUDA_ONLY: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn_attention,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "cudnn_batch_norm": _cudnn_batch_norm,
    "cudnn_batch_norm_backward": _cudnn_batch_norm_backward,
    "histc": _histogram,
    **dict.fromkeys(("_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor"), _uses_no_library),
    **dict.fromkeys(("_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor"), _uses_no_library),
    "_cudnn_rnn": recurrent_ops.forward,
    "_cudnn_rnn_backward": recurrent_ops.backward,
    "_cudnn_init_dropout_state": recurrent_ops.dropout_state,
    "_cudnn_rnn_flatten_weight": recurrent_ops.flat_weights,
    "_thnn_fused_lstm_cell": recurrent_ops.cell,
    "_thnn_fused_lstm_cell_backward_impl": recurrent_ops.cell_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
}
