"""A user's `torch.utils.checkpoint`, made to do nothing while a step is captured.

Traced as it is, its recomputation would be written into the graph, where it draws fresh dropout masks: wrong gradients
without an error.  memgraph decides itself what to recompute.  The functions behind `checkpoint` are replaced, not that
name: others hold partials of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as theirs

from ..errors import CaptureError

# `checkpoint` calls the second one up to torch 2.13, and the first one since.
GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


@contextmanager
def without_checkpoint() -> Iterator[None]:
    """Both of checkpoint's modes only call the function."""
    there = [name for name in GENERATORS if hasattr(theirs, name)]
    if not there or not hasattr(theirs, "CheckpointFunction"):
        raise CaptureError(
            f"torch.utils.checkpoint of torch {torch.__version__} is not laid out as memgraph knows it; "
            "a checkpoint in the model would give wrong gradients"
        )
    replaced: dict[str, Any] = {"CheckpointFunction": _Plain} | dict.fromkeys(there, _nothing)
    with mock.patch.multiple(theirs, **replaced):
        yield


def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """A generator in the place of the one that runs around a checkpointed function."""
    yield


class _Plain:
    """In the place of the autograd Function of the reentrant mode."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        # In the reentrant mode nothing inside gets a gradient unless one of the arguments asks for one.
        asked = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with torch.set_grad_enabled(asked and torch.is_grad_enabled()):
            return function(*args)
