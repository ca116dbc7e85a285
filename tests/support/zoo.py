"""The models of the promise: training steps whose memory is mostly activations, not parameters.

    model, batch = fresh(case)
    case.loss(batch.of(model)).backward()

Each runs a step in under a second on two cores. Its eager peak above parameters and batch is at least five times the
bytes of its parameters, so that budgets matter. `python tests/support/zoo.py` prints a table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from memgraph.profile.memory_meter import measure_peak, resident_bytes
from tests.support import models as nets


@dataclass(frozen=True)
class Batch:
    """The arguments of a model's call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def of(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Case:
    """A model, a batch and a loss. Model and batch are drawn from torch's global generator.

    A model that returns its loss `beside` other outputs is compiled as it is, and not together with a loss."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any], Tensor]
    beside: bool = False


def fresh(case: Case, seed: int = 0) -> tuple[nn.Module, Batch]:
    """Return a model and a batch; parameters, batch and generator state depend on the seed only."""
    torch.manual_seed(seed)
    return case.make(), case.batch()


def eager_peak(case: Case) -> int:
    """Return the peak of forward and backward above parameters, buffers and batch; gradients count."""
    model, batch = fresh(case)
    _, allocation = measure_peak(lambda: case.loss(batch.of(model)).backward())
    if allocation is None:
        raise RuntimeError(f"the peak of {case.name} can't be measured while another profiler runs")
    return allocation.peak


class Residual(nn.Module):
    """Two convolutions with a residual connection, and in-place ops where possible."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), blocks: int = 5, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]))
        self.relu = nn.ReLU(inplace=True)
        self.stages = nn.Sequential()
        for inputs, outputs in zip((widths[0], *widths), widths, strict=False):
            self.stages.append(Residual(inputs, outputs, 1 if inputs == outputs else 2))
            self.stages.extend(Residual(outputs, outputs) for _ in range(blocks - 1))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stages(self.relu(self.stem(images)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class MLP(nn.Module):
    """A model that is called by keyword, and returns a dict."""

    def __init__(self, width: int = 192, layers: int = 6) -> None:
        super().__init__()
        block = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers))
        self.blocks = nn.Sequential(*block)
        self.score = nn.Linear(width, 1)

    def forward(self, *, features: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        hidden = self.blocks(features * scale)
        return {"score": self.score(hidden).squeeze(-1), "hidden": hidden}


class Tied(nn.Module):
    """A language model whose head is its embedding, and whose forward changes the buffers that it reads."""

    mean: Tensor
    steps: Tensor

    def __init__(self, vocabulary: int = 512, width: int = 128, layers: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean(dim=(0, 1)), 0.1)
            self.steps += 1
        return self.head(x)


def convolved(inputs: int, outputs: int, times: int = 4) -> nn.Sequential:
    """Return several blocks of convolution, norm and activation."""
    layers: list[nn.Module] = []
    for channels in (inputs, *[outputs] * (times - 1)):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net: each level's last activation is concatenated on the way up."""

    def __init__(self, width: int = 16, levels: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.stem = convolved(3, width)
        self.down = nn.ModuleList(convolved(w, 2 * w) for w in widths)
        self.middle = convolved(2 * widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(convolved(3 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, skips = self.stem(images), []
        for down in self.down:
            skips.append(x)
            x = down(F.avg_pool2d(x, 2))
        x = self.middle(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1))
        return self.head(x)


class Inverted(nn.Module):
    """An inverted residual block: wide between narrow ends, with depthwise convolutions and norms."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True), nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y if x.shape == y.shape else y


class MobileNet(nn.Module):
    """A MobileNet that returns its loss and its terms, and has running statistics."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        sizes = [(8, 8, 1), (8, 8, 1), (8, 12, 2), (12, 12, 1), (12, 16, 2), (16, 16, 1)]
        self.blocks = nn.Sequential(*(Inverted(*size) for size in sizes))
        self.head = nn.Linear(16, classes)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return F.cross_entropy(logits, labels), logits


class Queue(nn.Module):
    """A contrastive model with a queue, which it reads and then writes by slice."""

    queue: Tensor

    def __init__(self, width: int = 48, layers: int = 12, length: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
        self.register_buffer("queue", F.normalize(torch.randn(length, width), dim=1))

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        found = F.normalize(self.layers(x).mean(1), dim=1)
        logits = found @ self.queue.clone().t()
        with torch.no_grad():
            self.queue[: len(x)] = found
        return F.cross_entropy(10 * logits, targets), logits


class Twice(nn.Module):
    """An encoder with norms that runs on two images, and a running mean in a buffer that is read first."""

    centre: Tensor

    def __init__(self, width: int = 12, features: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *convolved(3, width, 3), nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(width, features),
        )  # fmt: skip
        self.register_buffer("centre", torch.zeros(features))

    def forward(self, one: Tensor, other: Tensor) -> dict[str, Tensor]:
        left, right = self.encoder(one) - self.centre, self.encoder(other) - self.centre
        with torch.no_grad():
            self.centre.lerp_((left + right).mean(0), 0.1)
        return {"loss": (left - right).square().mean() - left.std(0).mean(), "left": left, "right": right}


def gpt2() -> nn.Module:
    return nets.gpt2(vocab_size=512, n_positions=128, n_embd=128, n_layer=4, n_head=4, use_cache=False)


def bert() -> nn.Module:
    return nets.bert(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
    )


def t5() -> nn.Module:
    return nets.t5(vocab_size=512, d_model=96, d_kv=24, d_ff=384, num_layers=3, num_heads=4, use_cache=False)


def vit() -> nn.Module:
    return nets.vit(
        hidden_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=384,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )


def llama() -> nn.Module:
    return nets.llama(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
    )


def tokens(batch: int, length: int, vocabulary: int = 512) -> Tensor:
    return torch.randint(1, vocabulary, (batch, length))


def text() -> Batch:
    ids = tokens(4, 128)
    return Batch(kwargs={"input_ids": ids, "labels": ids})


def padded() -> Batch:
    """Return sequences of different lengths, padded."""
    ids = tokens(4, 128)
    mask = (torch.arange(128) < torch.tensor([[128], [112], [96], [80]])).long()
    return Batch(kwargs={"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})


def translation() -> Batch:
    return Batch(kwargs={"input_ids": tokens(4, 96), "labels": tokens(4, 96)})


def pictures() -> Batch:
    return Batch(kwargs={"pixel_values": torch.randn(12, 3, 64, 64), "labels": torch.arange(12) % 10})


def cross_entropy(logits: Tensor) -> Tensor:
    """Return the cross entropy with generated labels: the classes in turn."""
    logits = logits.flatten(0, -2)
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device) % logits.shape[-1])


CASES = (
    Case("gpt2", gpt2, text, lambda outputs: outputs.loss),
    Case("bert", bert, padded, lambda outputs: outputs.loss),
    Case("t5", t5, translation, lambda outputs: outputs.loss),
    Case("vit", vit, pictures, lambda outputs: outputs.loss),
    Case("llama", llama, text, lambda outputs: outputs.loss),
    Case("resnet", ResNet, lambda: Batch((torch.randn(16, 3, 32, 32),)), cross_entropy),
    Case(
        "mlp",
        MLP,
        lambda: Batch(kwargs={"features": torch.randn(2048, 192), "scale": 0.5}),
        lambda outputs: outputs["score"].square().mean() + outputs["hidden"].abs().mean(),
    ),
    Case("tied", Tied, lambda: Batch((tokens(8, 128),)), cross_entropy),
    Case("unet", UNet, lambda: Batch((torch.randn(4, 3, 64, 64),)), lambda images: images.square().mean()),
)

# Models that return their loss with its terms, and write to buffers.
BESIDE = (
    Case("mobilenet", MobileNet, lambda: Batch((torch.randn(8, 3, 32, 32), torch.arange(8))), lambda out: out[0], True),
    Case("queue", Queue, lambda: Batch((torch.randn(16, 64, 48), torch.arange(16))), lambda out: out[0], True),
    Case(
        "twice", Twice, lambda: Batch((torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32))), lambda out: out["loss"],
        True,
    ),
)  # fmt: skip

# Its activations are logits, which the loss keeps: no budget much below eager's is enough.
LONG_QUEUE = Case(
    "long_queue", lambda: Queue(layers=2, length=16384), lambda: Batch((torch.randn(64, 4, 48), torch.arange(64))),
    lambda out: out[0], True,
)  # fmt: skip


def main() -> None:
    """Print the size of each model, and the peak and the time of its eager step."""
    print(f"{'model':10}{'parameters':>14}{'peak':>14}{'ratio':>8}{'step':>10}")
    for case in (*CASES, *BESIDE):
        parameters, peak = resident_bytes(fresh(case)[0].parameters()), eager_peak(case)
        print(f"{case.name:10}{parameters:14,}{peak:14,}{peak / parameters:8.1f}{milliseconds(case):7.0f} ms")


def milliseconds(case: Case, steps: int = 3) -> float:
    """Return the milliseconds of the fastest of a few forwards and backwards."""
    model, batch = fresh(case)
    took = []
    for _ in range(steps):
        start = perf_counter()
        case.loss(batch.of(model)).backward()
        took.append(1e3 * (perf_counter() - start))
        model.zero_grad()
    return min(took)


if __name__ == "__main__":
    main()
