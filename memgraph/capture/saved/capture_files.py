"""The file of captures: a call that an earlier process has captured is rehearsed, and its graph is read.

first process:   captured (2.0 s), and its graph is kept under the digest of its ops
second process:  rehearsed (0.8 s), the digest is the same: its graph is read (0.1 s)
another forward: rehearsed, the digest is another: captured

It is captures.sqlite, beside the costs of ops. `MEMGRAPH_CAPTURE_CACHE=0` neither reads nor writes it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

import memgraph

from ...guards.signature import kernel_modes
from ...system.fake_log import without_fake_errors
from ...system.measurement_cache import cache_folder, evict_oldest, read_cached, write_cached
from ...tensors.layout import has_storage
from ...tensors.loss_outputs import OutputSelector
from ..call.call import Call
from ..constant_fake_mode import ConstantFakeMode
from ..fake_tensors import fake_mode_context
from ..joint.joint_graph import JointGraph
from ..joint.trace_joint import trace_joint
from ..python_state.refuse_reseeding import refuse_reseeding
from ..python_state.refused_draws import refuse_python_random
from ..values.recurrent_layers import layers_are_whole
from .graph_record import NotRecordedError, graph_record, recorded_graph
from .op_log import OpLog
from .rehearsal import Rehearsal, RehearsalMode

FILE = "captures.sqlite"
DISK_NBYTES = 256 << 20  # of captures on disk; GPT2-124M takes 0.1 MB
LARGEST = 16  # captures of this share of the file are not kept
OPT_OUT = "MEMGRAPH_CAPTURE_CACHE"
LOG = logging.getLogger(__name__)


def call_kind(call: Call, grad: bool, wanted: OutputSelector) -> str:
    """Return what is known of a call before it runs: calls of another kind are not rehearsed. Empty to keep nothing."""
    if os.environ.get(OPT_OUT) == "0" or cache_folder() is None or not all(map(has_storage, call.tensors)):
        return ""
    storages: dict[int, int] = {}
    tensors = [
        (role, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.grad_fn is None,
         storages.setdefault(tensor.untyped_storage()._cdata, len(storages)))
        for role, tensor in zip(call.inputs, call.tensors, strict=True)
    ]  # fmt: skip
    kind = type(call.module)
    of = f"{kind.__module__}.{kind.__qualname__}", grad, wanted.__qualname__, layers_are_whole()
    return hashlib.sha256(repr((of, tensors, kernel_modes(), _versions())).encode()).hexdigest()


def find_capture(kind: str, call: Call, grad: bool, wanted: OutputSelector) -> tuple[JointGraph, fx.GraphModule] | None:
    """Return the graph that an earlier process has captured of this call, and its roles; None if there is none."""
    if not kind or read_cached(kind, FILE) is None:
        return None
    try:
        with without_fake_errors():
            return _found(kind, call, grad, wanted)
    except Exception as error:  # of forward, which the capture will meet again; or of a file that may hold anything
        LOG.info("no earlier capture is used, since %s: %s", type(error).__name__, error)
        return None


def keep_capture(kind: str, log: OpLog, graph: fx.GraphModule) -> None:
    """Keep a graph for later processes, if it has a kind and the log says all that it was made of."""
    if not kind:
        return
    digest = log.digest()
    if not digest:
        LOG.info("the capture is not kept for later processes: %s", log.reason)
        return
    try:
        content = packed(graph_record(graph, log.constants))
    except NotRecordedError as error:
        LOG.info("the capture is not kept for later processes: %s", error)
        return
    if len(content) <= DISK_NBYTES // LARGEST:
        write_cached(_key(kind, digest), content, FILE)
        write_cached(kind, True, FILE)
        evict_oldest(FILE, DISK_NBYTES)


def _found(kind: str, call: Call, grad: bool, wanted: OutputSelector) -> tuple[JointGraph, fx.GraphModule] | None:
    log = Rehearsal()
    mode = RehearsalMode(log)
    with (
        fake_mode_context(mode),
        refuse_python_random(call.module),
        torch.set_grad_enabled(grad),
        refuse_reseeding(call.module),
    ):
        joint = trace_joint(call, mode, wanted, log)
    digest = log.digest()
    content = read_cached(_key(kind, digest), FILE) if digest else None
    if content is None:
        LOG.info("no earlier capture is used: %s", log.reason or "forward does something else than when one was kept")
        return None
    return joint, recorded_graph(unpacked(content), log.constants, ConstantFakeMode())


def packed(record: object) -> str:
    """Return the compressed JSON of a record, as text."""
    return base64.b64encode(zlib.compress(json.dumps(record).encode(), 1)).decode()


def unpacked(content: str) -> Any:
    """Return the record of a text."""
    return json.loads(zlib.decompress(base64.b64decode(content)))


def _key(kind: str, digest: str) -> str:
    return f"{kind} {digest}"


@cache
def _versions() -> tuple[object, ...]:
    """Return what makes a graph of ops: torch, and the sources of this package."""
    folder = Path(memgraph.__file__).parent
    sources = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        sources.update(path.read_bytes())
    return torch.__version__, torch.version.git_version, sources.hexdigest()
