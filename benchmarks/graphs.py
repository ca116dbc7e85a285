"""Traces for the planner's benchmark: steps of large models in bf16, captured without memory.

    python -m benchmarks.graphs gpt12-d FILE    # the trace of GPT L12, decomposed to core aten

Weights are never written, so they take addresses and no memory; no op runs. Ops are priced by a roofline like an
A100's. A decomposed graph (-d) is traced with torch's core-aten decompositions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import transformers
import typer
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from benchmarks.blocks import default_dtype
from benchmarks.depth import DEPTHS
from benchmarks.nets import GPT, ResNet, Size, UNet
from memgraph.capture.capture import capture
from memgraph.capture.joint import trace_joint
from memgraph.graph.nodes import tensors
from memgraph.graph.summarize import Cost, summarize
from memgraph.profile.op_profiler import is_view
from memgraph.tensors.loss_outputs import select_losses
from passes import Trace
from tests.support import models as nets

FLOPS = 172e6  # of an A100 in bf16, per microsecond, as far as large matrix products reach them
BANDWIDTH = 1.2e6  # bytes per microsecond
LAUNCH = 4.0  # microseconds


@dataclass(frozen=True)
class Graph:
    """A model, and the arguments of its call."""

    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Tensor, ...]] = tuple
    kwargs: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)

    @property
    def called_with(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return self.args(), {name: make() for name, make in self.kwargs.items()}


def main(name: str, file: Path) -> None:
    """Write a trace, and print its nodes and the seconds that capture took."""
    begin = time.perf_counter()
    trace = trace_of(name)
    file.write_text(str(trace))
    print(len(trace.ops), round(time.perf_counter() - begin, 1))


def trace_of(name: str) -> Trace:
    """Return the priced step of a graph by its name; the suffix -d decomposes it."""
    base, _, decomposed = name.partition("-")
    model = unwritten(GRAPHS[base].make)
    args, kwargs = GRAPHS[base].called_with
    with decomposing() if decomposed else nullcontext():
        captured = capture(model, args, kwargs, wanted=select_losses)
    return summarize(captured.graph.graph, roofline)


def unwritten(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model in bf16 with uninitialized weights."""
    with torch.device("meta"), default_dtype(torch.bfloat16):
        model = make()
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    if isinstance(model, transformers.PreTrainedModel):
        model.tie_weights()  # to_empty makes two tensors of a tied one
    return model


@contextmanager
def decomposing() -> Iterator[None]:
    """Make capture decompose every op into core-aten ops."""
    decomposed = partial(make_fx, decomposition_table=core_aten_decompositions())  # type: ignore[arg-type]
    with mock.patch.object(trace_joint, "make_fx", decomposed):
        yield


def roofline(node: fx.Node) -> Cost:
    """Return the time of an op: that of its flops or of its bytes, whichever is longer, and a launch."""
    if is_view(node):
        return Cost()
    nbytes = sum(value.untyped_storage().nbytes() for each in (*node.all_input_nodes, node) for value in tensors(each))
    return Cost(round(max(_flops(node) / FLOPS, nbytes / BANDWIDTH) + LAUNCH, 2))


def _flops(node: fx.Node) -> float:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0.0
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda read: read.meta["val"])
    return float(count(*args, **kwargs, out_val=node.meta["val"]))


def _language(size: Size, batch: int) -> Graph:
    return Graph(partial(GPT, size), lambda: (_zeros(batch, size.context), _zeros(batch, size.context)))


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long)


def _images(count: int, size: int) -> Tensor:
    return torch.empty(count, 3, size, size, dtype=torch.bfloat16)


def _t5() -> nn.Module:
    return nets.t5(
        vocab_size=2048, num_layers=12, d_model=768, d_ff=2048, num_heads=12, dropout_rate=0.0, use_cache=False
    )


GRAPHS = {
    "gpt12": _language(Size(12, 768, 12), 8),
    "gpt24": _language(Size(24, 1024, 16), 8),
    "xl": _language(Size(48, 1600, 25), 4),
    "llama16": _language(Size(16, 2048, 16, context=2048, gated=True), 4),
    "llama32": _language(Size(32, 2048, 16, context=2048, gated=True), 4),
    "unet": Graph(UNet, lambda: (_images(8, 256), _images(8, 256))),
    "resnet50": Graph(ResNet, lambda: (_images(32, 224), _zeros(32))),
    "vit": Graph(partial(nets.vit, num_labels=1000), lambda: (_images(64, 224),), {"labels": partial(_zeros, 64)}),
    "t5": Graph(_t5, kwargs={"input_ids": partial(_zeros, 8, 512), "labels": partial(_zeros, 8, 512)}),
    "gpt96": _language(Size(96, 1024, 16), 4),
    **{f"deep{depth}": _language(Size(depth, 1024, 16), 4) for depth in DEPTHS},
}


if __name__ == "__main__":
    typer.run(main)
