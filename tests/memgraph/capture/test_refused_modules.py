"""A module that can't be captured is refused at its first call, with the line or the name and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support.faults import ROOM, Net, assert_next_step_right, batch, fresh


def test_sparse_gradients_are_refused() -> None:
    module = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(
        memgraph.CaptureError, match=r"gradient of parameter 0\.weight is torch\.sparse_coo: use sparse=False"
    ):
        memgraph.compile(module, ROOM)(torch.tensor([1, 2]))


def test_a_model_on_several_devices_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"\['cpu', 'meta'\]; move it to one"):
        memgraph.compile(module, ROOM)


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        memgraph.compile(nn.Linear(2, 2, device="meta"), ROOM)(torch.randn(1, 2, device="meta"))


def test_an_input_on_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="device"):
        fresh()[1](torch.randn(8, 16, device="meta"))


def test_a_lazy_module_that_never_ran_is_refused() -> None:
    with pytest.raises(memgraph.CaptureError, match="run the lazy module once"):
        memgraph.compile(nn.Sequential(nn.LazyLinear(4)), ROOM)(batch())


def test_a_lazy_module_that_ran_once_trains() -> None:
    module = nn.Sequential(nn.LazyLinear(4))
    module(batch())
    assert_next_step_right(module, memgraph.compile(module, ROOM))


NOT_DENSE: dict[str, Callable[[], Tensor]] = {
    "torch.sparse_coo Tensor.*give its indices": lambda: torch.eye(16).to_sparse(),
    "torch.sparse_csr Tensor.*give its indices": lambda: torch.eye(16).to_sparse_csr(),
    "nested tensor.*pad the rows": lambda: torch.nested.nested_tensor([torch.ones(2, 16), torch.ones(3, 16)]),
    "quantized tensor.*dequantize": lambda: torch.quantize_per_tensor(torch.ones(8, 16), 0.1, 0, torch.qint8),
    "torch._mkldnn Tensor.*to_dense": lambda: torch.ones(8, 16).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore")  # torch's, of what is in beta
@pytest.mark.parametrize("says", NOT_DENSE)
def test_an_argument_that_is_not_dense_is_refused_by_its_kind(says: str) -> None:
    module, compiled = fresh()
    x = NOT_DENSE[says]()
    with pytest.raises(memgraph.CaptureError, match=f"input 0 is a {says}"):
        compiled(x)
    with pytest.raises(memgraph.CaptureError, match=f"input 0 is a {says}"):
        memgraph.plan(module, x)


def test_a_sparse_buffer_is_refused_by_its_name() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].register_buffer("adjacency", torch.eye(4).to_sparse())
    with pytest.raises(memgraph.CaptureError, match=r"buffer 0\.adjacency is a torch\.sparse_coo Tensor"):
        memgraph.compile(module, ROOM)


def test_an_argument_that_hides_tensors_is_refused_by_its_type() -> None:
    class Locked:
        def __reduce__(self) -> str:
            raise TypeError("no")

    class Taking(Net):
        def forward(self, x: Tensor, other: object = None) -> Tensor:
            return super().forward(x)

    with pytest.raises(memgraph.CaptureError, match=r"Locked, which can't be taken apart"):
        memgraph.compile(Taking(), ROOM)(batch(), Locked())


def here() -> int:
    """The line after that of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno + 1
