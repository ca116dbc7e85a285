"""A model in a stock configuration, the batch that it is called with, and its loss.

training = Training(model, kwargs={"input_ids": tokens, "labels": tokens})
training.loss(training.model(*training.args, **training.kwargs)).backward()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def loss_of(outputs: Any) -> Tensor:
    """Return the loss that a model of transformers returns when it is given labels."""
    return outputs.loss


@dataclass(frozen=True)
class Training:
    """A model and its call; the model returns its loss, beside other outputs."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] = loss_of

    def to(self, device: torch.device) -> Training:
        """Return the training with its model, which is moved, and its batch on a device."""
        args, kwargs = tree_map_only(Tensor, lambda x: x.to(device), (self.args, dict(self.kwargs)))
        return replace(self, model=self.model.to(device), args=args, kwargs=kwargs)


Maker = Callable[[], Training]


class WithCriterion(nn.Module):
    """A model and its criterion in one, as trainers wrap them; returns the loss and the outputs."""

    def __init__(self, model: nn.Module, criterion: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, *args: Any, target: Any = None, **kwargs: Any) -> tuple[Tensor, Any]:
        outputs = self.model(*args, **kwargs)
        return self.criterion(outputs, target), outputs


def with_criterion(
    model: nn.Module, criterion: Callable[..., Tensor], *args: Any, target: Any = None, **kwargs: Any
) -> Training:
    """Return the training of a model that does not know its loss."""
    return Training(WithCriterion(model, criterion), args, {**kwargs, "target": target}, _first)


def classifier(model: nn.Module, size: int = 64, rows: int = 8, classes: int = 10) -> Training:
    """Return the training of a model that classifies images."""
    images, target = torch.randn(rows, 3, size, size), torch.randint(classes, (rows,))
    return with_criterion(model, nn.functional.cross_entropy, images, target=target)


def _first(outputs: tuple[Tensor, Any]) -> Tensor:
    return outputs[0]
