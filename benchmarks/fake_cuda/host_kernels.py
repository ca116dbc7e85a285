"""Run Python on a described device whose ops are computed by the host.

    python -m benchmarks.fake_cuda.described_device h200 -m benchmarks.fake_cuda.host_kernels pytest -m gpu tests/gpu

Before: memory of a described device can be allocated, and no op can run.
After:  an op on `cuda:0` runs torch's CPU kernel on the bytes of its tensors; results are allocated on `cuda:0`.

What torch does above its kernels is as on a device: which ops it takes, its allocator, streams, events, pinned memory,
CUDA graphs, autograd's threads, and a workspace of cuBLAS for each thread and stream. Other kernels take no memory of
their own, all work has ended when a call returns, and the times of events are the host's.
"""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .host_draws import drawing, next_seed
from .host_graphs import HostGraphs, Workspaces
from .host_tensors import CUDA, OnHost, on_host, to_device, without_values

NO_KERNEL = {  # ops that launch nothing
    *("as_strided", "empty.memory_format", "empty_strided", "resize_", "view", "_reshape_alias", "unfold", "alias"),
    *("set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to"),
    *("record_stream", "is_pinned", "_pin_memory", "view_as_real", "view_as_complex", "_efficientzerotensor"),
}
COMPOSITE = "convolution", "convolution_backward", "copy_"  # they launch kernels themselves
READ = "_local_scalar_dense", "equal", "nonzero", "masked_select"  # by the host, which no capture allows
PRODUCTS = "mm", "bmm", "addmm", "baddbmm", "addmv", "dot", "_addmm_activation"
WORKSPACE = 33 << 20  # bytes of cuBLAS and cuBLASLt for a thread and a stream, on an H100 and an H200
SHAPES = "--shapes"  # compute no large tensors
LARGE = 4096  # numbers
GRAPHS = HostGraphs()
_workspaces: Workspaces = {}
_library = torch.library.Library("aten", "IMPL", "CUDA")


def install(only_shapes: bool = False) -> None:
    """Replace the kernels of all ops of a CUDA device, in this process.

    With `only_shapes` results of ops with large tensors are allocated and have no values.
    """
    from .cuda_only_ops import CUDA_ONLY

    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")} - NO_KERNEL
    for name in sorted(names | {*COMPOSITE, *CUDA_ONLY}):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None:
            run = partial(_run, op, CUDA_ONLY.get(name) or partial(_called, op))
            _library.impl(name, partial(_run_small, op, run) if only_shapes else run, "CUDA", allow_override=True)
    GRAPHS.install()


def _run(op: Any, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an op of the device on the host, or record it while a graph is captured."""
    tensors: list[tuple[Tensor, Tensor]] = []  # of the host, and the caller's

    def there(value: Any) -> Any:
        found = on_host(value)
        if isinstance(value, Tensor):
            tensors.append((found, value))
        return found

    is_captured, name = torch.cuda.is_current_stream_capturing(), op._schema.name.removeprefix("aten::")
    if name in PRODUCTS:
        _keep_workspace(GRAPHS.workspaces if is_captured else _workspaces)
    args, kwargs = tree_map(there, (args, kwargs))
    if is_captured:
        if name in READ:
            torch.cuda.synchronize()  # which raises what torch raises
        return GRAPHS.record(compute, args, kwargs, tensors)
    return _returned(compute(*args, **kwargs), tensors)


def _run_small(op: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an op if its tensors are small, or else allocate its results."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if all(each.numel() <= LARGE for each in given):
        return run(*args, **kwargs)
    if op is torch.ops.aten.copy_.default:
        return args[0]
    if op is torch.ops.aten.equal.default:
        return True
    if op._schema.name.removeprefix("aten::") in PRODUCTS:
        _keep_workspace(_workspaces)
    places = {id(each): without_values(each) for each in given}
    args, kwargs = tree_map(lambda each: places.get(id(each), without_values(each)), (args, kwargs))
    results = _called(op, *args, **kwargs)
    if op is torch.ops.aten._scaled_dot_product_efficient_attention.default:
        results = *results[:2], *(torch.tensor(0).as_subclass(OnHost) for _ in results[2:])
    return _returned(results, [(places[id(each)], each) for each in given])


def _returned(results: Any, tensors: list[tuple[Tensor, Tensor]]) -> Any:
    """Return results on the device: the caller's tensors where they are these."""
    for there, value in tensors:
        is_new = there.numel() > 0 and not value.untyped_storage().nbytes()
        if there is not value and (is_new or there.shape != value.shape):  # it was empty, or the op has resized it
            value.resize_(there.shape).as_strided_(there.shape, there.stride())  # dense, as all that ops make
            if not there.is_meta:
                on_host(value).copy_(there)
    given = {id(there): value for there, value in tensors}
    return tree_map(lambda each: given[id(each)] if id(each) in given else to_device(each), results)


def _called(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an op on tensors of another device than its caller's."""
    generator = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)), None)
    args, kwargs = tree_map(lambda each: None if isinstance(each, torch.Generator) else each, (args, kwargs))
    # The dispatcher gives a number to a kernel where the schema has a tensor, and takes only tensors.
    kinds = zip(op._schema.arguments, args, strict=False)
    has_numbers = any(isinstance(value, Number) and "Tensor" in str(each.type) for each, value in kinds)
    call = op.overloadpacket if has_numbers else op
    with drawing(next_seed(generator)) if torch.Tag.nondeterministic_seeded in op.tags else nullcontext():
        return call(*args, **kwargs)


def _keep_workspace(kept: Workspaces) -> None:
    """Allocate what cuBLAS has for this thread and stream, if it is not there."""
    place = threading.get_ident(), torch.cuda.current_stream().cuda_stream
    if place not in kept:
        kept[place] = torch.empty(WORKSPACE, dtype=torch.uint8, device=CUDA)


def main(*arguments: str) -> None:
    """Run a module as `python -m` does, or code behind `-c`."""
    only_shapes = arguments[:1] == (SHAPES,)
    install(only_shapes)
    sys.argv = list(arguments[only_shapes:])
    if sys.argv[0] == "-c":
        exec(sys.argv[1], {"__name__": "__main__"})
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from benchmarks.fake_cuda import host_kernels  # not this copy of it, which has the name __main__

    host_kernels.main(*sys.argv[1:])
