"""The trace has the dtypes, shapes and strides of the kernels' results, and results have eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.nn import functional as F

import memgraph
from memgraph.capture.capture import capture
from memgraph.capture.constant_fake_mode import ConstantFakeMode
from memgraph.graph.op_descriptions import DESCRIBED, DESCRIPTIONS
from memgraph.profile.divided_arguments import FILLERS
from memgraph.profile.op_profiler import OpProfiler
from tests.support.captured_calls import agrees
from tests.support.kernel_layouts import differences

Function = Callable[..., Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Calling(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def drawn(*shape: int, order: str = "") -> Tensor:
    """A tensor; `order` is channels last, or transposed."""
    x = torch.randn(shape)
    if order == "last":
        x = x.contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    elif order == "transposed":
        x = x.mT.contiguous().mT
    return x


def ends(*places: int) -> Tensor:
    return torch.tensor(places, dtype=torch.int32)


class Weighing(nn.Module):
    """A function of a parameter, whose gradient gets its order of dimensions."""

    def __init__(self, function: Function, weight: Tensor) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(weight.detach())

    def forward(self) -> Any:
        return self.function(self.weight)


def assert_described(function: Function, *inputs: Any) -> None:
    module = Calling(function)
    assert differences(module, *inputs) == []
    agrees(module, *inputs)


@pytest.mark.long
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [6, 16])
def test_grouped_products(dtype: torch.dtype, width: int) -> None:
    x, w = torch.randn(7, 8, dtype=dtype), torch.randn(3, width, 8, dtype=dtype)
    flat, sums = torch.randn(3, 16, 8, dtype=dtype), torch.randn(7, 16, dtype=dtype)
    product = torch._grouped_mm
    with torch.no_grad():
        assert_described(lambda x, w, o: product(x, w.mT, offs=o), x, w, ends(2, 2, 7))
        assert_described(lambda x, y, o: product(x.t(), y, offs=o), x, sums, ends(2, 5, 7))
        assert_described(lambda w, x, o: product(w, x, offs=o), flat, torch.randn(8, 16, dtype=dtype), ends(2, 4, 16))
        assert_described(lambda w, y: product(w, y.mT), flat, w)
    assert_described(
        lambda x, w, o: product(x, w.mT, offs=o) * 2, x.requires_grad_(), flat.requires_grad_(), ends(2, 2, 7)
    )


class Experts(nn.Module):
    """Experts as transformers runs them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(4, 64, 32, dtype=dtype) / 8)
        self.down = nn.Parameter(torch.randn(4, 32, 64, dtype=dtype) / 8)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        h = torch._grouped_mm(x, self.up.mT, offs=offsets).relu()
        return torch._grouped_mm(h, self.down.mT, offs=offsets).float().square().mean()


@pytest.mark.long
@pytest.mark.parametrize("dtype", FLOATS)
def test_experts_keep_to_their_forecast_whatever_rows_they_get(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    plain = Experts(dtype)
    for offsets in (ends(80, 80, 80, 80), ends(1, 20, 40, 80), ends(0, 0, 0, 80)):
        model = Experts(dtype)
        compiled = memgraph.compile(model, "1GB", time_limit=0)
        x = torch.randn(80, 32, dtype=dtype)
        for run, owner in ((compiled, model), (plain, plain)):
            owner.zero_grad()
            run(x, offsets).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
        assert compiled.plan.measured is not None
        assert compiled.plan.measured <= compiled.plan.peak


def normed(x: Tensor) -> Tensor:
    return F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2).reshape(-1, x.shape[-1]) * 2


def evaluated(x: Tensor) -> Tensor:
    mean, variance = x.detach().mean((0, 1)), x.detach().var((0, 1))
    return F.batch_norm(x.transpose(1, 2), mean, variance).transpose(1, 2).reshape(-1, x.shape[-1]) * 2


def unpooled(x: Tensor) -> Tensor:
    return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), (2, 2))


TARGETS = torch.tensor([[1, 2, 3, 1, 1], [1, 2, 4, 2, 2]])
LENGTHS = torch.tensor([6, 5]), torch.tensor([3, 2])


def ctc(targets: Tensor, *lengths: Any, **options: Any) -> Function:
    return lambda x: F.ctc_loss(x.log_softmax(-1), targets, *lengths, **options)


OPS: dict[str, tuple[Function, Tensor]] = {
    "ctc": (ctc(TARGETS, *LENGTHS), drawn(6, 2, 5)),
    "ctc of each": (ctc(TARGETS, *LENGTHS, reduction="none", zero_infinity=True), drawn(6, 2, 5)),
    "ctc, lists": (ctc(TARGETS, [6, 5], [5, 2]), drawn(6, 2, 5)),
    "ctc, one row": (ctc(torch.tensor([1, 2, 3]), torch.tensor(6), torch.tensor(3)), drawn(6, 5)),
    "roll": (lambda x: x.roll((1, 2), (2, 3)).permute(0, 2, 3, 1).reshape(2, 64, 3) * 2, drawn(2, 3, 8, 8, order="last")),
    "roll, flat": (lambda x: x.roll(3) * 2, drawn(5, 4, order="transposed")),
    "max_unpool": (lambda x: unpooled(x).permute(0, 2, 3, 1).flatten(1) * 2, drawn(2, 3, 8, 8, order="last")),
    "reflect": (lambda x: F.pad(x, (1, 1, 1, 1), "reflect") * 2, drawn(2, 3, 8, 8, order="last")),
    "replicate": (lambda x: F.pad(x, (1, 1, 1, 1), "replicate") * 2, drawn(2, 3, 8, 8, order="last")),
    "batch norm": (normed, drawn(3, 5, 8)),
    "batch norm, eval": (evaluated, drawn(3, 5, 8)),
    "cross entropy": (lambda x: F.cross_entropy(x * 2, torch.tensor([[0, 1], [2, 2]])), drawn(2, 3, 2, order="transposed")),
    "segmentation": (lambda x: F.cross_entropy(x * 2, torch.ones(2, 4, 4).long()), drawn(2, 3, 4, 4, order="last")),
    "logits": (lambda x: F.binary_cross_entropy_with_logits(x * 2, torch.ones(5, 4)), drawn(5, 4, order="transposed")),
    "huber": (lambda x: F.huber_loss(x * 2, torch.ones(5, 4)), drawn(5, 4, order="transposed")),
    "squares": (lambda x: F.mse_loss(x.view(3, 5, 4).transpose(1, 2), torch.ones(3, 4, 5)), drawn(15, 4)),
    "smooth l1": (lambda x: F.smooth_l1_loss(x.view(3, 5, 4).transpose(1, 2), torch.ones(3, 4, 5)), drawn(15, 4)),
    "entropy of each": (lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(5, 4), reduction="none").flatten() * 2,
                        drawn(5, 4, order="transposed")),
    "power": (lambda x: (2.0**x).flatten() * 2, drawn(5, 4, order="transposed")),
    "logaddexp": (lambda x: torch.logaddexp(x, x[0]).flatten() * 2, drawn(3, 5, 4, order="transposed")),
    "unfold": (lambda x: F.fold(F.unfold(x, 3, padding=1), (8, 8), 3, padding=1), drawn(2, 3, 8, 8)),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("function, x", OPS.values(), ids=OPS)
def test_ops(function: Function, x: Tensor) -> None:
    module = Weighing(function, x)
    assert differences(module) == []
    agrees(module)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (2, 6, 4)])
@pytest.mark.parametrize("driver", [None, "gels"])
def test_least_squares(shape: tuple[int, ...], driver: str | None) -> None:
    """Only shapes: two calls of eager's differ in their last bits, by where its workspace lies in memory."""
    module = Calling(lambda a, b: tuple(torch.linalg.lstsq(a, b, driver=driver)))
    a, b = torch.randn(shape), torch.randn(*shape[:-1], 3)
    with torch.no_grad():
        assert differences(module, a, b) == []
        solution = memgraph.compile(module, "1GB", time_limit=0)(a, b)[0]
    torch.testing.assert_close(solution, torch.linalg.lstsq(a, b, driver=driver).solution)


def test_what_ctc_loss_keeps_is_forecast_for_the_longest_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGRAPH_CACHE", "")
    targets = torch.ones(4, 50, dtype=torch.long)
    for length in (2, 49, 50):
        model = nn.Sequential(nn.Linear(8, 8), Calling(ctc(targets, torch.full((4,), 120), torch.full((4,), length))))
        compiled = memgraph.compile(model, "1GB", time_limit=0)
        compiled(torch.randn(120, 4, 8)).backward()
        assert compiled.plan.measured is not None
        assert compiled.plan.measured <= compiled.plan.peak


def test_each_described_op_is_in_the_table_once_and_says_why() -> None:
    assert sum(len(row.ops) for row in DESCRIPTIONS) == len({op for row in DESCRIPTIONS for op in row.ops})
    assert all(len(row.reason) > 20 for row in DESCRIPTIONS)
    assert {torch.ops.aten._grouped_mm.default, torch.ops.aten._ctc_loss.Tensor} <= DESCRIBED.keys()


@pytest.mark.parametrize(
    "op, args, kwargs",
    [
        (torch.segment_reduce, (torch.rand(6, 2), "sum"), {"lengths": torch.tensor([4, 2])}),
        (torch.segment_reduce, (torch.rand(6, 2), "max"), {"offsets": torch.tensor([0, 4, 6])}),
        (torch.repeat_interleave, (torch.tensor([4, 2]),), {"output_size": 6}),
    ],
)
def test_ops_that_divide_their_work_are_priced_with_all_of_it(op: Function, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        graph = capture(Calling(lambda *given: op(*given, *args[1:], **kwargs)), args[:1], {}).graph.graph
    nodes = [node for node in graph.nodes if str(node.target) in FILLERS]
    assert nodes
    assert all(OpProfiler(1 << 30).layouts(node) is not None for node in nodes)


@pytest.mark.parametrize(
    ("device", "dtype", "blank", "known"),
    [
        ("cpu", torch.int32, 0, True),
        ("cuda:0", torch.int64, 0, True),
        ("cuda:0", torch.int32, 1, True),
        ("cuda:0", torch.int32, 0, False),
    ],
)
def test_whether_cudnn_takes_a_ctc_loss_is_decided_by_no_lengths_of_zero(
    device: str, dtype: torch.dtype, blank: int, known: bool
) -> None:
    choose = torch.ops.aten._use_cudnn_ctc_loss.Tensor
    with ConstantFakeMode():
        scores = torch.empty(6, 2, 4, device=device)
        targets, lengths = torch.empty(2, 3, dtype=dtype, device=device), torch.empty(2, dtype=torch.long)
        with nullcontext() if known else pytest.raises(UnsupportedOperatorException):
            assert choose(scores, targets, lengths, lengths, blank) is False
