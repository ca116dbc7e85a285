"""Refuse a recurrent layer whose dropout cuDNN draws from a state that can't be read.

    nn.LSTM(8, 8, num_layers=2, dropout=0.1) on a GPU, in training   ->   RefusedDropoutError

torch keeps that state for the process, advances it in each forward, and makes a new one after a generator was set. So
a forward that runs again in backward would draw another mask, and the next step another than eager's.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from ..errors import CaptureError


class RefusedDropoutError(CaptureError):
    """No part around this layer can run as it is either."""


def refuse_hidden_dropout(path: str, part: nn.Module, devices: Collection[str]) -> None:
    """
    Args:
        devices: types of those that the part reads from.

    Raises:
        RefusedDropoutError: a recurrent layer of the part would draw such a dropout.
    """
    if "cuda" not in devices or not torch.backends.cudnn.enabled:
        return
    for name, layer in part.named_modules(prefix=path):
        if isinstance(layer, nn.RNNBase) and layer.training and layer.dropout > 0 and layer.num_layers > 1:
            raise RefusedDropoutError(
                f"{name} ({type(layer).__name__}) has dropout={layer.dropout} between its layers, which cuDNN draws "
                "from a state that torch keeps for the process and can't restore: draw it with nn.Dropout between "
                "layers of their own, or run without cuDNN, with torch.backends.cudnn.enabled = False"
            )
