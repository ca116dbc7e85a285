"""Price ops by the figures of a device profile, without running any.

mm f32[4096, 4096] x f32[4096, 4096] on an l4   ->   4536 us = 137e9 flops / 30.3e12 flops per second
a storage of 1000 bytes on a GPU                ->   1024 bytes, in blocks of its allocator

Kernels of libraries take workspaces that no shape tells; those that the profile does not name are not counted.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from passes import Op, Storage, Trace

from ..graph.nodes import tensors
from ..graph.summarize import Cost
from ..profile.memory_meter import resident_bytes
from ..profile.op_profiler import is_view
from ..profile.roofline import computed_dtype, roofline_us
from .device_profile import PER_US, DeviceProfile


class ProfilePrices:
    """The prices of a device's ops."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile

    def __call__(self, node: fx.Node) -> Cost:
        """Return the time of an op, and its workspace if the profile has one."""
        if is_view(node):
            return Cost()
        nbytes = resident_bytes(value for source in (*node.all_input_nodes, node) for value in tensors(source))
        us = roofline_us(node, nbytes, self.profile.rates(computed_dtype(node)))
        workspace = int(self.profile.workspaces.get(str(node.target), 0.0) * nbytes)
        return Cost(round(max(us, self.profile.op_us), 2), workspace)

    def copied_us(self, nbytes: int) -> float:
        """Return the time to read or write so many bytes of the device's memory."""
        return round(nbytes / (self.profile.bandwidth * PER_US), 1)


def in_blocks(trace: Trace, block: int) -> Trace:
    """Return the trace with the size of each storage rounded up to a multiple of `block` bytes."""

    def rounded(nbytes: int) -> int:
        return -(-nbytes // block) * block

    def with_blocks(op: Op) -> Op:
        makes = tuple(Storage(made.name, rounded(made.nbytes)) for made in op.makes)
        return replace(op, makes=makes, workspace=rounded(op.workspace))

    return trace if block == 1 else replace(trace, ops=tuple(map(with_blocks, trace.ops)))
