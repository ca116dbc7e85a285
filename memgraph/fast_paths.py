"""Torch's fused layers in a trace: eager takes them without gradients, and they differ in the last bits.

    TransformerEncoderLayer, eval, no_grad   ->   one aten._transformer_encoder_layer_fwd, as in eager

Where torch sees that it is traced it leaves them out, because a trace may want to differentiate what is in them.  Here
nobody does: with gradients, torch does not take them in eager either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn.modules import activation


@contextmanager
def fused_layers() -> Iterator[None]:
    """Let attention and encoder layers choose as they do when nobody traces."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.overrides, "has_torch_function", _is_overridden))
        if hasattr(activation, "_is_make_fx_tracing"):
            stack.enter_context(mock.patch.object(activation, "_is_make_fx_tracing", lambda: False))
        yield


def _is_overridden(tensors: Iterable[object]) -> bool:
    """Whether a class of one of these overrides torch's functions; the mode of the trace does not count."""
    kinds = {type(tensor) for tensor in tensors} - {Tensor}
    off = torch._C._disabled_torch_function_impl
    return any(getattr(kind, "__torch_function__", off) is not off for kind in kinds)
