"""Ops of torch's own list: what a trace says of each, forward and backward, is what its kernels make.

Values are compared in `test_op_descriptions.py` and where models are; here it is types, shapes and strides.
"""

from __future__ import annotations

import pytest

import memgraph
from tests.support.kernel_layouts import differences
from tests.support.sampled_ops import modules_of, ops

# Each has had another layout, or none, in one of torch's fakes; or its kernel lays results out in a way of its own.
CHOSEN = (
    "cdist", "cumprod", "logcumsumexp", "searchsorted", "histc", "index_reduce amax", "scatter_reduce amax",
    "scatter_reduce prod", "nn.functional.embedding_bag", "nn.functional.grid_sample", "nn.functional.unfold",
    "nn.functional.fold", "nn.functional.max_unpool2d", "nn.functional.max_unpool3d", "nn.functional.ctc_loss",
    "nn.functional.multi_margin_loss", "nn.functional.pad reflect", "nn.functional.batch_norm", "linalg.qr",
    "linalg.eigh", "linalg.svd", "linalg.lu", "linalg.solve", "linalg.pinv", "linalg.cholesky", "fft.rfft", "fft.irfft",
    "stft", "istft", "roll", "masked_select", "nonzero", "unique", "repeat_interleave", "masked_fill",
    "movedim", "permute",
)  # fmt: skip
# The list holds the function itself, where a module's call of `torch.tensor_split` is replaced in a trace.
REFUSED = frozenset({"sparse.mm reduce", "sparse.sampled_addmm", "to_sparse", "tensor_split"})


def assert_described(name: str, count: int) -> None:
    for module, inputs in modules_of(name, count):
        try:
            module(*[tensor.detach().clone() for tensor in inputs])
        except RuntimeError:
            continue  # nothing that eager runs either
        assert differences(module, *inputs) == [], name


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(CHOSEN) & ops().keys()))
def test_an_op_is_described_as_its_kernel_makes_it(name: str) -> None:
    assert_described(name, count=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(name for name in ops().keys() - REFUSED if not name.startswith("jiterator"))
)  # for GPUs
def test_every_op_is_described_as_its_kernel_makes_it(name: str) -> None:
    try:
        assert_described(name, count=8)
    except memgraph.CaptureError as error:
        assert "sparse" in str(error) or "depends on" in str(error)
