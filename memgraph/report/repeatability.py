"""Name the ops of a step whose results differ from run to run on a GPU, in eager as well.

aten.index_add.default, aten._scaled_dot_product_flash_attention_backward.default   ->   "gradients are eager's to the
bit where eager gives the same twice; here it need not: 2 x _scaled_dot_product_flash_attention_backward, index_add"

Their kernels add in the order in which threads come. With `torch.use_deterministic_algorithms(True)` torch takes
others, or raises an error. The list is that of torch's documentation of this function; for attention, of its sources.
"""

from __future__ import annotations

from collections import Counter

from passes import Trace

ATTENTION = tuple(
    f"{name}_backward"
    for name in (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_flash_attention", "_efficient_attention", "_cudnn_attention",
    )
)  # fmt: skip
RESIZING = tuple(
    f"{name}_backward"
    for name in (
        "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
        "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler_2d", "grid_sampler_3d",
    )
)  # fmt: skip
POOLING = tuple(
    f"{name}_backward"
    for name in (
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "avg_pool3d",
        "max_pool3d_with_indices", "fractional_max_pool2d", "fractional_max_pool3d", "reflection_pad1d",
        "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
    )
)  # fmt: skip
ADDING = (
    "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "put", "put_",
    "histc", "bincount", "convolution_backward", "nll_loss2d_forward", "nll_loss2d_backward", "_ctc_loss_backward",
    "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward",
)  # fmt: skip
SCANNING = ("cumsum", "cumsum_")  # of floating point numbers alone
UNREPEATABLE = frozenset((*ATTENTION, *RESIZING, *POOLING, *ADDING, *SCANNING))
FLOATS = ("f", "bf", "c")


def unrepeatable_ops(trace: Trace) -> Counter[str]:
    """Return how often each op of a step on a GPU is one that need not give the same twice."""
    found: Counter[str] = Counter()
    for op in trace.ops:
        name = op.fn.split(".")[1] if op.fn.startswith("aten.") else ""
        if name in UNREPEATABLE and (name not in SCANNING or op.type.startswith(FLOATS)):
            found[name] += 1
    return found


def repeatability(trace: Trace, device: str) -> list[str]:
    """Return a line that names these ops; none on a CPU, or where there are none."""
    found = unrepeatable_ops(trace) if device.startswith("cuda") else Counter[str]()
    if not found:
        return []
    names = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in found.most_common())
    return [
        "gradients are eager's to the bit where eager gives the same twice; with these ops it need not, unless "
        f"torch.use_deterministic_algorithms(True) is set: {names}"
    ]
