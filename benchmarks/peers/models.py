"""The models that run beside their peers: stock ones of six families, with steps below a second on a CPU.

    built = MODELS["llama"]
    model, batch = built.made(checkpointed), built.batch()
    loss_of(model(**batch)).backward()

`block` is what users checkpoint: a layer of a transformer, a residual block, a level of a U-Net, a layer of an LSTM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer
from transformers.models.vit.modeling_vit import ViTLayer

from benchmarks.nets import Through, UNet, plainly
from tests.support import models as stock

VOCABULARY = 1024


@dataclass(frozen=True)
class Model:
    """A model that returns a loss or has one in its output, its batch, and the class of its blocks."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Mapping[str, Tensor]]
    block: type[nn.Module]

    def made(self, through: Through) -> nn.Module:
        """Return the model, whose blocks are called `through` something."""
        model = self.make()
        for block in model.modules():
            if isinstance(block, self.block) and through is not plainly:
                block.forward = partial(through, block.forward)
        return model


class LSTM(nn.Module):
    """A language model of some layers of an LSTM."""

    def __init__(self, layers: int = 4, width: int = 192) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(input_ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def loss_of(output: Any) -> Tensor:
    """Return the loss that a call returned, alone or in the output of a model of transformers."""
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def gpt() -> nn.Module:
    return stock.gpt2(vocab_size=VOCABULARY, n_positions=256, n_embd=256, n_layer=6, n_head=8, use_cache=False)


def llama() -> nn.Module:
    return stock.llama(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=640, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip


def vit() -> nn.Module:
    return stock.vit(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=8, intermediate_size=1024, image_size=112,
        patch_size=8, num_labels=100,
    )  # fmt: skip


def resnet() -> nn.Module:
    """Return a ResNet-18."""
    widths = [64, 128, 256, 512]
    config = ResNetConfig(hidden_sizes=widths, depths=[2, 2, 2, 2], layer_type="basic", num_labels=100)
    return ResNetForImageClassification(config)


def tokens(count: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (count, length))
    return {"input_ids": ids, "labels": ids}


def labelled(count: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, size, size), "labels": torch.randint(100, (count,))}


def noisy(count: int, size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 3, size, size), "wanted": torch.randn(count, 3, size, size)}


MODELS = {
    "gpt": Model(gpt, partial(tokens, 4, 256), GPT2Block),
    "llama": Model(llama, partial(tokens, 4, 256), LlamaDecoderLayer),
    "vit": Model(vit, partial(labelled, 8, 112), ViTLayer),
    "resnet": Model(resnet, partial(labelled, 8, 160), ResNetBasicLayer),
    "unet": Model(partial(UNet, 16, 4), partial(noisy, 8, 96), nn.Sequential),
    "lstm": Model(LSTM, partial(tokens, 32, 64), nn.LSTM),
}
