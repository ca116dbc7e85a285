"""Tensors of images in layouts that leave the memory format of a result open, and ops that take them.

laid_out((1, 64, 4, 4), "tokens")   ->   strides (1024, 1, 256, 64), as those of tokens that become an image again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LAYOUTS = ("contiguous", "channels_last", "tokens", "permuted", "half")
SHAPES = ((2, 64, 4, 4), (1, 64, 4, 4), (2, 64, 4, 1), (2, 64, 1, 1), (1, 64, 1, 1), (1, 64, 4, 1))
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm": lambda x: F.group_norm(x, 4),
    "instance_norm": lambda x: F.instance_norm(x),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm, evaluated": lambda x: F.batch_norm(x, torch.zeros(64), torch.ones(64)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "conv2d": lambda x: F.conv2d(x, torch.ones(64, 64, 3, 3), padding=1),
    "conv2d of a size": lambda x: F.conv2d(x, torch.ones(32, 64, 1, 1), torch.ones(32), stride=2),
    "grouped conv2d": lambda x: F.conv2d(x, torch.ones(64, 1, 3, 3), padding=1, groups=64),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, torch.ones(64, 64, 2, 2), stride=2),
    "conv3d": lambda x: F.conv3d(x.unsqueeze(2), torch.ones(8, 64, 1, 3, 3), padding=(0, 1, 1)),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 1, 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "pad": lambda x: F.pad(x, (0, 1, 0, 1)),
    "roll": lambda x: x.roll(1, 2),
    "flip": lambda x: x.flip(2),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "glu": lambda x: F.glu(x, 1),
    "silu": F.silu,
    "gelu": F.gelu,
    "elu": F.elu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "prelu": lambda x: F.prelu(x, torch.full((64,), 0.2)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "dropout": lambda x: F.dropout(x, 0.5),
    "channel_shuffle": lambda x: torch.channel_shuffle(x, 4),
    "cat": lambda x: torch.cat([x, x.contiguous()], 1),
    "stack": lambda x: torch.stack([x, x], 1).flatten(1, 2),
    "where": lambda x: torch.where(x > 0, x, x.contiguous()),
    "add": lambda x: x.contiguous() + x,
    "gate": lambda x: x * F.adaptive_avg_pool2d(x, 1).sigmoid(),
    "clamp": lambda x: torch.clamp(x, max=x.contiguous()),
    "lerp": lambda x: torch.lerp(x, x.contiguous(), 0.3),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1)[0],
    "index": lambda x: x[:, torch.arange(0, 64, 2)],
    "gather": lambda x: x.gather(1, torch.zeros(x.shape[0], 4, *x.shape[2:], dtype=torch.long)),
    "mean": lambda x: x.mean(1, keepdim=True),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "reshape": lambda x: x.reshape(x.shape[0], 8, 8, -1),
    "tokens": lambda x: x.flatten(2).transpose(1, 2) @ torch.ones(64, 64),
    "permuted linear": lambda x: F.linear(x.permute(0, 2, 3, 1), torch.ones(64, 64), torch.ones(64)).permute(
        0, 3, 1, 2
    ),
    "einsum": lambda x: torch.einsum("bchw,dc->bdhw", x, torch.ones(64, 64)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "cast": lambda x: x.to(torch.bfloat16).float(),
    "clone": lambda x: x[:, :1].expand_as(x).clone(),
    "fft": lambda x: torch.fft.fft2(x).real,
    "fold": lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1),
}


def laid_out(shape: Sequence[int], layout: str) -> Tensor:
    """Return an image in one of LAYOUTS; `shape` is that of a batch of images with its channels second."""
    n, channels, height, width = shape
    x = torch.randn(n, channels, height, width)
    if layout == "channels_last":
        return x.to(memory_format=torch.channels_last)
    if layout == "tokens":
        return torch.randn(n, height * width, channels).transpose(1, 2).reshape(n, channels, height, width)
    if layout == "permuted":
        return torch.randn(n, width, height, channels).permute(0, 3, 2, 1)
    if layout == "half":
        return torch.randn(n, 2 * channels, height, width).to(memory_format=torch.channels_last)[:, :channels]
    return x
