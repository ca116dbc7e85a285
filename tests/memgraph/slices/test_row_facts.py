"""Each rule of an op is tried on uneven parts, and each group of reads in which it is said to be linear.

Results of parts that are put together are bit-equal, apart from kernels that take another way for other sizes; sums of
parts are added in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memgraph.capture.capture import capture, operands
from memgraph.graph.nodes import aten
from memgraph.slices.row_facts import RULES, row_facts
from memgraph.tensors.loss_outputs import select_all
from passes.slices.row_rule import RowFacts
from tests.support.row_parts import traced, wrong
from tests.support.sampled_ops import modules_of, ops

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def mask(*shape: int) -> Tensor:
    return some(*shape) > 0


def index(size: int, *shape: int) -> Tensor:
    return torch.randint(size, shape, generator=torch.Generator().manual_seed(5))


POINTWISE: dict[str, Case] = {
    "broadcast": (aten.add.Tensor, (some(4, 6, 3), some(6, 1))),
    "alpha": (lambda x, y: aten.add.Tensor(x, y, alpha=3), (some(4, 6), some(4, 6))),
    "x + x": (lambda x: aten.add.Tensor(x, x), (some(4, 6),)),
    "x - x": (lambda x: aten.sub.Tensor(x, x), (some(4, 6),)),
    "x + 0": (lambda x: aten.add.Tensor(x, aten.zeros_like(x)), (some(4, 6),)),
    "x + 2": (lambda x: aten.add.Tensor(x, aten.full([4, 6], 2.0)), (some(4, 6),)),
    "x * x": (lambda x: aten.mul.Tensor(x, x), (some(4, 6),)),
    "x * y": (aten.mul.Tensor, (some(4, 6, 2, 2), some(6, 1, 2))),
    "x * number": (lambda x: aten.mul.Tensor(x, 2.5), (some(4, 6),)),
    "x * integers": (aten.mul.Tensor, (some(4, 6), index(9, 6))),
    "x / x": (lambda x: aten.div.Tensor(x, x), (some(4, 6),)),
    "x / y": (aten.div.Tensor, (some(4, 6), some(4, 1))),
    "gradient twice": (lambda x: aten.sigmoid_backward(x, x), (some(4, 6),)),
    "threshold": (lambda g, x: aten.threshold_backward(g, x, 0.1), (some(4, 6), some(4, 6))),
    "tanh_backward": (aten.tanh_backward, (some(4, 6), some(4, 6))),
    "one row": (aten.mul.Tensor, (some(4, 1, 6), some(1, 5, 1))),
    "no elements": (aten.mul.Tensor, (some(4, 0, 6), some(4, 1, 6))),
    "four dimensions": (aten.maximum, (some(3, 4, 5, 2), some(4, 1, 2))),
    "ones in both": (aten.mul.Tensor, (some(4, 1), some(4, 1))),
    "a number": (aten.fmax, (some(4, 6), some())),  # atan2 has other last bits at the end of a row without AVX512
    "power": (aten.pow.Tensor_Tensor, (some(4, 6).abs(), some(6))),
    "addcmul": (lambda x, y, z: aten.addcmul(x, y, z, value=2), (some(4, 6), some(6), some(4, 1))),
    "lerp": (aten.lerp.Tensor, (some(4, 6), some(6), some(4, 1))),
    "gelu": (aten.gelu, (some(4, 6),)),
    "silu": (aten.silu, (some(3, 4, 6),)),
    "of a transposed": (lambda x: aten.exp(aten.t(x)), (some(7, 9),)),
    "of every other": (lambda x: aten.neg(aten.slice.Tensor(x, 1, 1, 9, 2)), (some(7, 9),)),
    "polygamma": (lambda x: aten.polygamma(1, x), (some(6, 6).abs(),)),
    "integers": (aten.bitwise_and.Tensor, (index(9, 4, 6), index(9, 6))),
    "complex": (aten.mul.Tensor, (some(4, 6, dtype=torch.complex64), some(6))),
    "where": (aten.where.self, (mask(4, 6), some(4, 6), some(6))),
    "where, number": (lambda m, x: aten.where.self(m, x, aten.scalar_tensor(1.0)), (mask(4, 6), some(4, 6))),
    "where, 0": (lambda m, x: aten.where.self(m, x, aten.scalar_tensor(0.0)), (mask(4, 1), some(4, 6))),
    "where, 0 first": (lambda m, x: aten.where.self(m, aten.full([], 0.0), x), (mask(4, 1), some(4, 6))),
    "where, same": (lambda m, x: aten.where.self(m, x, x), (mask(4, 1), some(4, 6))),
    "masked_fill, 0": (lambda x, m: aten.masked_fill.Scalar(x, m, 0), (some(4, 6), mask(4, 6))),
    "masked_fill, 1": (lambda x, m: aten.masked_fill.Scalar(x, m, 1), (some(4, 6), mask(4, 1))),
    "masked_fill, -inf": (lambda x, m: aten.masked_fill.Scalar(x, m, float("-inf")), (some(4, 6), mask(6))),
    "to bfloat16": (lambda x: aten._to_copy(x, dtype=torch.bfloat16), (some(4, 6),)),
    "from integers": (lambda x: aten._to_copy(x, dtype=torch.float32), (index(9, 4, 6),)),
    "copy of a transposed": (
        lambda x: aten.clone(aten.t(x), memory_format=torch.contiguous_format), (some(4, 6),)
    ),
    "channels last": (lambda x: aten.clone(x, memory_format=torch.channels_last), (some(4, 6, 3, 2),)),
}  # fmt: skip
VIEWS: dict[str, Case] = {
    "merge": (lambda x: aten.view(x, [-1, 6]), (some(4, 3, 6),)),
    "split": (lambda x: aten.view(x, [4, 3, -1]), (some(12, 6),)),
    "other rows": (lambda x: aten.view(x, [4, 6]), (some(6, 4),)),
    "other rows behind": (lambda x: aten.view(x, [5, 2, 12]), (some(5, 6, 4),)),
    "of a transposed": (lambda x: aten.view(aten.t(x), [6, 2, 2]), (some(4, 6),)),
    "of a copy": (lambda x: aten._unsafe_view(aten.clone(x), [12, 2]), (some(4, 3, 2),)),
    "of nothing": (lambda x: aten.view(x, [0, 2, 2]), (some(0, 4),)),
    "one batch": (lambda x: aten.view(x, [1, 6, 4]), (some(6, 4),)),
    "t": (aten.t, (some(4, 6),)),
    "t of one": (aten.t, (some(4),)),
    "transpose": (lambda x: aten.transpose.int(x, -1, -2), (some(4, 3, 2),)),
    "transpose a number": (lambda x: aten.transpose.int(x, 0, 0), (some(),)),
    "permute": (lambda x: aten.permute(x, [-1, 0, 1]), (some(4, 3, 2),)),
    "squeeze": (aten.squeeze.default, (some(4, 1, 3),)),
    "squeeze nothing": (lambda x: aten.squeeze.dim(x, 1), (some(4, 3),)),
    "squeeze behind": (lambda x: aten.squeeze.dim(x, -2), (some(4, 1, 3),)),
    "squeeze some": (lambda x: aten.squeeze.dims(x, [0, -2]), (some(4, 1, 3),)),
    "unsqueeze": (lambda x: aten.unsqueeze(x, -1), (some(4, 3),)),
    "unsqueeze between": (lambda x: aten.unsqueeze(x, -2), (some(4, 3),)),
    "expand": (lambda x: aten.expand(x, [-1, 5]), (some(4, 1),)),
    "expand before": (lambda x: aten.expand(x, [2, -1, 5]), (some(4, 1),)),
    "expand one": (lambda x: aten.expand(x, [4, 5]), (some(1, 5),)),
    "slice": (lambda x: aten.slice.Tensor(x, 1, 1, -1, 2), (some(6, 7),)),
    "slice all": (lambda x: aten.slice.Tensor(x), (some(6, 7),)),
}
REDUCTIONS: dict[str, Case] = {
    "sum": (aten.sum.default, (some(4, 6),)),
    "sum as float64": (lambda x: aten.sum.default(x, dtype=torch.float64), (some(4, 6),)),
    "sum of integers": (aten.sum.default, (index(9, 4, 6),)),
    "sum of a mask": (lambda x: aten.sum.dim_IntList(x, [0]), (mask(4, 6),)),
    "sum over ends": (lambda x: aten.sum.dim_IntList(x, [0, -1]), (some(4, 6, 5),)),
    "sum, keepdim": (lambda x: aten.sum.dim_IntList(x, [0, -1], True), (some(4, 6, 5),)),
    "sum by name": (lambda x: aten.sum.dim_IntList(x, dim=[1], keepdim=True, dtype=torch.float64), (some(4, 6, 5),)),
    "sum over no dims": (lambda x: aten.sum.dim_IntList(x, []), (some(4, 6, 5),)),
    "sum over all": (lambda x: aten.sum.dim_IntList(x, None), (some(4, 6, 5),)),
    "sum of complex": (lambda x: aten.sum.dim_IntList(x, [0]), (some(4, 6, dtype=torch.complex64),)),
    "mean": (lambda x: aten.mean.dim(x, [1]), (some(4, 6, 5),)),
    "mean of all": (lambda x: aten.mean.dim(x, None), (some(4, 6, 5),)),
    "amax": (lambda x: aten.amax(x, [-1], True), (some(4, 6, 5),)),
    "amin of all": (aten.amin, (some(4, 6, 5),)),
    "amax of a number": (lambda x: aten.amax(x, [0]), (some(),)),
    "logsumexp": (lambda x: aten.logsumexp(x, [-1]), (some(4, 6, 5),)),
    "var": (lambda x: aten.var.correction(x, [1], correction=1, keepdim=True), (some(4, 6, 5),)),
    "std": (lambda x: aten.std.correction(x, [1]), (some(4, 6, 5),)),
    "std of all": (aten.std.correction, (some(4, 6, 5),)),
}
PRODUCTS: dict[str, Case] = {
    "mm": (aten.mm, (some(6, 4), some(4, 9))),
    "mm of one": (lambda x: aten.mm(x, x), (some(6, 6),)),
    "mm of integers": (aten.mm, (index(9, 6, 4), index(9, 4, 2))),
    "mm of complex": (aten.mm, (some(6, 4, dtype=torch.complex64), some(4, 9, dtype=torch.complex64))),
    "mm over nothing": (aten.mm, (some(6, 0), some(0, 9))),
    "mm of a transposed": (lambda x, y: aten.mm(aten.t(x), y), (some(4, 6), some(4, 9))),
    "addmm": (aten.addmm, (some(9), some(6, 4), some(4, 9))),
    "addmm of squares": (aten.addmm, (some(6), some(6, 6), some(6, 6))),
    "addmm, column": (lambda b, x, y: aten.addmm(b, x, y, beta=2, alpha=3), (some(6, 1), some(6, 4), some(4, 9))),
    "addmm, whole": (aten.addmm, (some(6, 9), some(6, 4), some(4, 9))),
    "addmm of one": (lambda b, x: aten.addmm(b, x, x), (some(6), some(6, 6))),
    "addmm to a factor": (lambda b, x: aten.addmm(b, b, x), (some(6, 6), some(6, 6))),
    "bmm": (aten.bmm, (some(3, 6, 4), some(3, 4, 5))),
    "bmm of one batch": (aten.bmm, (some(1, 6, 4), some(1, 4, 5))),
    "bmm of one": (lambda x: aten.bmm(x, x), (some(4, 4, 4),)),
}
BY_INDEX: dict[str, Case] = {
    "embedding": (aten.embedding, (some(7, 4), index(7, 3, 5))),
    "embedding, padding": (lambda w, i: aten.embedding(w, i, 2), (some(5, 5), index(5, 5))),
    "embedding of a number": (aten.embedding, (some(7, 4), torch.tensor(3))),
    "gather": (lambda x, i: aten.gather(x, 1, i), (some(6, 7), index(7, 6, 2))),
    "gather of fewer": (lambda x, i: aten.gather(x, 1, i), (some(6, 7), index(7, 4, 2))),
    "gather behind": (lambda x, i: aten.gather(x, -1, i), (some(6, 2, 7), index(7, 6, 2, 1))),
    "scatter a number": (lambda x, i: aten.scatter.value(x, 1, i, 2.0), (some(6, 7), index(7, 6, 2))),
    "scatter": (lambda x, i, s: aten.scatter.src(x, 1, i, s), (some(6, 7), index(7, 6, 1), some(6, 3))),
    "scatter_add": (lambda x, i, s: aten.scatter_add(x, -1, i, s), (some(6, 7), index(7, 6, 3), some(6, 3))),
    "scatter_add to zeros": (
        lambda i, s: aten.scatter_add(aten.zeros([6, 7]), -1, i, s), (index(7, 6, 3), some(6, 3))
    ),
    "slice_backward": (lambda x: aten.slice_backward(x, [6, 9], -1, 1, 8, 1), (some(6, 7),)),
    "cat": (lambda x, y: aten.cat([x, y], 1), (some(6, 7), some(6, 2))),
    "cat of rows": (lambda x, y: aten.cat([x, y]), (some(6, 7), some(6, 7))),
    "cat of one": (lambda x: aten.cat([x, x], -1), (some(6, 7),)),
    "cat with nothing": (lambda x, y: aten.cat([x, y], -1), (some(6, 7), some(0))),
    "cat with zeros": (lambda x: aten.cat([x, aten.zeros([6, 1])], -1), (some(6, 7),)),
    "flip": (lambda x: aten.flip(x, [-1]), (some(6, 7),)),
    "softmax": (lambda x: aten._softmax(x, -1, False), (some(3, 6, 7),)),
    "softmax of rows": (lambda x: aten._softmax(x, 0, False), (some(3, 6, 7),)),
    "log_softmax": (lambda x: aten._log_softmax(x, 1, False), (some(6, 7),)),
    "log_softmax of halves": (lambda x: aten._log_softmax(x, 1, False), (some(6, 7, dtype=torch.bfloat16),)),
    "log_softmax backward": (
        lambda g, y: aten._log_softmax_backward_data(g, y, -1, torch.float32), (some(6, 7), some(6, 7))
    ),
    "softmax backward twice": (lambda g: aten._softmax_backward_data(g, g, -1, torch.float32), (some(6, 7),)),
    "loss, mean": (
        lambda g, y, t, n: aten.nll_loss_backward(g, y, t, None, 1, 2, n), (some(), some(6, 7), index(7, 6), some())
    ),
    "loss, none": (
        lambda g, y, t, n: aten.nll_loss_backward(g, y, t, None, 0, 2, n), (some(6), some(6, 7), index(7, 6), some())
    ),
    "loss, weights": (
        lambda g, y, t, w, n: aten.nll_loss_backward(g, y, t, w, 2, 2, n),
        (some(), some(6, 7), index(7, 6), some(7), some()),
    ),
    "loss of one row": (
        lambda g, y, t, n: aten.nll_loss_backward(g, y, t, None, 1, 2, n), (some(), some(7), torch.tensor(3), some())
    ),
}  # fmt: skip
CONSTANT: dict[str, Case] = {
    "zeros": (lambda: aten.zeros([4, 6]), ()),
    "full": (lambda: aten.full([4, 6], 2.0), ()),
    "full_like": (lambda x: aten.full_like(x, 2.0), (some(4, 6),)),
    "zeros_like": (lambda x: aten.zeros_like(aten.t(x)), (some(4, 6),)),
    "new_zeros": (lambda x: aten.new_zeros(x, [3, 5]), (some(4, 6),)),
    "new_full": (lambda x: aten.new_full(x, [3, 5], 1.5), (some(4, 6),)),
}
CASES = {
    f"{kind}: {name}": case
    for kind, cases in (
        ("pointwise", POINTWISE), ("view", VIEWS), ("reduction", REDUCTIONS), ("product", PRODUCTS),
        ("by index", BY_INDEX), ("constant", CONSTANT),
    )
    for name, case in cases.items()
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_an_op_in_parts_is_the_op(name: str) -> None:
    function, inputs = CASES[name]
    assert wrong(traced(function, *inputs), inputs) == []


@pytest.mark.long
def test_each_op_that_has_rules_is_tried() -> None:
    tried = {node.target for function, inputs in CASES.values() for node in traced(function, *inputs).nodes}
    assert RULES.keys() - tried - {aten.reshape.default} == set()  # a trace has views or copies instead


def facts(function: Callable[..., Any], *inputs: Tensor) -> RowFacts:
    """Return the facts of the last op of a function."""
    return row_facts([node for node in traced(function, *inputs).nodes if node.op == "call_function"][-1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.bernoulli.p(x, 0.5),
        aten.rand_like,
        lambda x: aten.native_dropout(x, 0.5, True),
        lambda x: aten.add_.Tensor(aten.clone(x), 1.0),
        lambda x: aten.cumsum(x, 0),
        aten.tril,
        lambda x: aten.bucketize.Tensor(x, aten.full([6], 1.0)),
        lambda x: aten.arange(6),
    ],
)
def test_what_draws_writes_or_depends_on_the_place_of_a_row_has_no_rules(function: Callable[..., Any]) -> None:
    assert facts(function, some(6, 6).sigmoid()) == RowFacts()


def test_an_op_that_takes_rows_one_way_only_says_so() -> None:
    assert list(map(str, facts(aten.mm, some(6, 4), some(4, 9)).rules)) == ["0:1<0:1,-", "1:2<-,1:2", "+<1:2,0:1"]
    assert list(map(str, facts(lambda x: aten._softmax(x, 1, False), some(6, 4)).rules)) == ["0:1<0:1"]
    assert list(map(str, facts(aten.add.Tensor, some(2, 6, 4), some(6, 1)).rules)) == [
        "0:1<0:1,-",
        "1:2<1:2,0:1",
        "2:3<2:3,-",
    ]


def test_a_sum_is_linear_in_all_its_terms_and_in_those_that_are_not_zeros() -> None:
    both = facts(aten.add.Tensor, some(4, 6), some(4, 6))
    assert both.is_linear({0, 1}) and not both.is_linear({0}) and not both.is_linear({1})
    alone = facts(lambda x: aten.add.Tensor(x, aten.zeros([4, 6])), some(4, 6))
    assert alone.is_linear({0})
    factors = facts(aten.mul.Tensor, some(4, 6), some(4, 6))
    assert factors.is_linear({0}) and factors.is_linear({1}) and not factors.is_linear({0, 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name in ops() if not name.startswith("jiterator")))
def test_every_op_of_torchs_list_in_parts_is_the_op(name: str) -> None:
    for module, inputs in modules_of(name, 3):
        try:
            captured = capture(module, tuple(inputs), {}, wanted=select_all)
        except Exception:
            continue  # nothing that has a step
        placeholders = captured.graph.graph.find_nodes(op="placeholder")
        tangents = [node.meta["val"] for node in placeholders if node.meta["kind"] == "tangent"]
        given = [*operands(module, tuple(inputs), {}), *(torch.randn(t.shape).to(t.dtype) for t in tangents)]
        with torch.no_grad():
            assert wrong(captured.graph.graph, given, captured.graph) == []
