"""Autograd as outside of a step, in a block inside of one.

with autograd_keys(): y = x * 2               ->   y has a grad_fn, though a step runs its graph below autograd
with saved_tensor_hooks(are_off=False): ...   ->   hooks for what autograd saves work, though a trace turns them off
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C._autograd import _saved_tensors_hooks_set_tracing

# A step runs its graph below these.
AUTOGRAD = (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.AutogradNestedTensor)


@contextmanager
def autograd_keys(grad: bool = True) -> Iterator[None]:
    """Let autograd see the ops of a block, in this grad mode."""
    included = torch._C._dispatch_tls_local_include_set() | DispatchKeySet(DispatchKey.ADInplaceOrView)
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in AUTOGRAD:
        excluded = excluded.remove(key)
    guard = torch._C._ForceDispatchKeyGuard(included, excluded)
    with guard, torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


@contextmanager
def saved_tensor_hooks(are_off: bool) -> Iterator[None]:
    """Turn hooks for saved tensors off in a block, as a trace does, or on again."""
    before = _saved_tensors_hooks_set_tracing(are_off)
    try:
        yield
    finally:
        _saved_tensors_hooks_set_tracing(before)
