"""Make models of transformers and what they are called with.

made("GPT2LMHeadModel", {"n_layer": 2}, tokens(labels=True))   ->   Training
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..training import Training

ROWS, LENGTH, VOCABULARY = 4, 64, 256
IGNORED = -100  # a label that the losses of transformers skip
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip


def made(model: str, config: Mapping[str, Any], inputs: Mapping[str, Any]) -> Training:
    """Return the training of a model whose configuration is the stock one but for these sizes."""
    import transformers

    kind = getattr(transformers, model)
    return Training(kind(kind.config_class(**config)).train(), kwargs=inputs)


def decoder(model: str, labels: bool = True, length: int = LENGTH, **config: Any) -> Training:
    """Return the training of a language model on padded rows."""
    return made(model, {**SMALL, **config}, tokens(length, labels="same" if labels else ""))


def encoder(model: str, labels: str = "same", length: int = LENGTH, **config: Any) -> Training:
    """Return the training of an encoder on padded rows."""
    return made(model, {**SMALL, **config}, tokens(length, labels))


def tokens(length: int = LENGTH, labels: str = "same", vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Return padded rows of tokens, their mask, and labels: of each token, a class of each row, or none."""
    ids = torch.randint(5, vocabulary, (ROWS, length))
    mask = padding(ROWS, length)
    batch = {"input_ids": ids * mask + 1 - mask, "attention_mask": mask}
    if labels == "same":
        batch["labels"] = ids.masked_fill(mask == 0, IGNORED)
    elif labels == "rows":
        batch["labels"] = torch.randint(2, (ROWS,))
    return batch


def padding(rows: int, length: int) -> Tensor:
    """Return a mask of rows that end earlier and earlier."""
    ends = torch.tensor([length - row * length // (2 * rows) for row in range(rows)])
    return (torch.arange(length)[None] < ends[:, None]).long()
