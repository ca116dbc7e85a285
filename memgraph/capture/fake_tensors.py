"""Fake tensors, and the modes of torch around a trace.

No real tensor is read or written. Random generators and autocast's cache are restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.traceback import preserve_node_meta
from torch.nn.parameter import is_lazy

from ..errors import CaptureError
from ..graph.captured import Input
from ..graph.recurrent.autograd_modes import saved_tensor_hooks
from ..guards.read_objects import show_attributes
from ..system.device import CPU
from ..system.garbage import paused_collector
from .call.require_strided import require_strided
from .scripted_functions import unscripted
from .sizes.size_inputs import SizeInputs

MAX_CACHED_OPS = 4096  # of some kB each; torch has no limit


@contextmanager
def fake_mode_context(mode: FakeTensorMode) -> Iterator[None]:
    """Enter the modes in which a step is traced."""
    with ExitStack() as stack:
        stack.enter_context(paused_collector())
        stack.enter_context(torch.inference_mode(False))
        stack.callback(_clear_full_cache)
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        stack.enter_context(mode)
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(preserve_node_meta())
        stack.enter_context(unscripted())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        # The caller's, such as those of a checkpoint around the call, are for real tensors.
        stack.enter_context(saved_tensor_hooks(are_off=True))
        # A submodule that the user compiled runs as it is.
        stack.enter_context(torch._dynamo.config.patch(error_on_nested_fx_trace=False))
        yield


def _clear_full_cache() -> None:
    """Clear torch's cache of ops on fake tensors once it is full: it grows with each new shape of a call."""
    if len(FakeTensorMode.cache) > MAX_CACHED_OPS:
        FakeTensorMode.cache_clear()


@contextmanager
def without_autocast(values: Iterable[Tensor]) -> Iterator[None]:
    """Disable autocast, as around `loss.backward()` in an ordinary loop."""
    with ExitStack() as stack:
        for device in {"cpu", *(value.device.type for value in values)}:
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def make_fake(tensor: Tensor, mode: FakeTensorMode, role: Input, sizes: SizeInputs | None = None) -> Tensor:
    """Return a tensor without bytes, of the same strides, since kernels look at strides.

    A parameter or buffer of device "meta" stands for one on the CPU; an input of it is an error of the caller's.
    """
    if is_lazy(tensor):
        raise CaptureError(f"{role.label} has no shape yet: run the lazy module once before it is compiled")
    require_strided(tensor, role.label)
    if tensor.is_conj() or tensor.is_neg():
        raise CaptureError(f"{role.label} is lazily conjugated or negated: call .resolve_conj().resolve_neg() on it")
    if role.kind == "buffer" and tensor.requires_grad:
        raise CaptureError(f"{role.label} requires a gradient: make it a parameter")
    shape, strides = sizes.layout(role, tensor.shape, tensor.stride()) if sizes else (tensor.shape, tensor.stride())
    with mode, torch.no_grad():
        device = CPU if tensor.device.type == "meta" and role.kind != "input" else tensor.device
        empty = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):  # forward may ask, as torch.nn.utils.parametrize does
            empty = nn.Parameter(empty, tensor.requires_grad)
    show_attributes(empty, tensor, role.label, role.kind == "input")
    return empty.requires_grad_(tensor.requires_grad)
