"""Results of ops that torch's fake tensors describe wrongly or not at all.

    aten._grouped_mm(f32[7, 8], f32[3, 8, 6], offs)    torch: an error    ->   f32[7, 6] with strides (8, 1)
    aten.native_batch_norm(f32[2, 4, 8] transposed)    torch: transposed  ->   contiguous

A step is traced on what is said here, and run on what kernels make. Where the two differ, a `view` fails when the step
runs, or a forecast is too low. Each row gives its reason. Sizes that only a kernel knows are measured with its price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DynamicOutputShapeException, UnsupportedOperatorException
from torch.utils._pytree import tree_map_only

from ..tensors.traced_size import SizeNeededError
from .aten_shims import COPY_STORAGES, longest_target
from .nodes import aten

Describe = Callable[..., Any]


class Description(NamedTuple):
    """Describes these ops, by the result that torch's fakes give (unless `instead`) and by the op's arguments."""

    ops: tuple[str, ...]
    reason: str
    describe: Describe
    instead: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")


def describe(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], mode: FakeTensorMode, run: Describe) -> Any:
    """Return the fake result of an op with the layout and the storages that its kernel makes; `run` asks torch."""
    description = DESCRIBED.get(func)
    if description is None or _device(args) not in description.devices:
        return run()
    if description.instead:
        with mode:
            return description.describe(*args, **kwargs)
    result = run()
    with mode:
        return description.describe(result, *args, **kwargs)


def _device(args: Sequence[Any]) -> str:
    return next((arg.device.type for arg in args if isinstance(arg, Tensor)), "")


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    if a.dim() == b.dim():
        first = a.shape[0] if offs is None or a.dim() == 3 else offs.shape[0]
        sizes = [first, a.shape[-2], b.shape[-1]]
    else:
        sizes = [a.shape[-2], b.shape[-1]]
    dtype = out_dtype or a.dtype
    aligned = 1 if torch.version.hip else 16 // dtype.itemsize
    row = -(-sizes[-1] // aligned) * aligned
    strides = [sizes[1] * row, row, 1] if len(sizes) == 3 else [row, 1]
    return a.new_empty_strided(sizes, strides, dtype=dtype)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    steps, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = longest_target(targets) if isinstance(target_lengths, Tensor) else max(target_lengths, default=0)
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def _ctc_loss_backward(gradient: Tensor, log_probs: Tensor, *args: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _use_cudnn_ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int
) -> bool:
    """Return False where cuDNN never takes the loss.

    Raises:
        UnsupportedOperatorException: that depends on the lengths.
    """
    if log_probs.dtype == torch.float32 and targets.dtype == torch.int32 and not blank and log_probs.is_cuda:
        raise UnsupportedOperatorException(aten.ctc_loss.Tensor)
    return False


def _use_miopen_ctc_loss(*args: Any) -> bool:
    """Return False where there is no MIOpen.

    Raises:
        UnsupportedOperatorException: there is, and it depends on the lengths.
    """
    if torch.version.hip is not None:
        raise UnsupportedOperatorException(aten.ctc_loss.Tensor)
    return False


def _lstsq(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Describe all results but the residuals of drivers that find the rank, which exist for full rank only."""
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    rows, columns = a.shape[-2:]
    batch = list(torch.broadcast_shapes(a.shape[:-2], b.shape[: a.dim() - 2]))
    is_vector = b.dim() == a.dim() - 1
    if rows > columns and driver in ("gelsd", "gelss"):
        raise DynamicOutputShapeException(aten.linalg_lstsq.default)
    sides = 1 if is_vector else b.shape[-1]
    solved = b.new_empty([*batch, sides, max(rows, columns)]).mT.narrow(-2, 0, columns)
    residuals = [*batch, sides] if rows > columns and driver != "gelsy" else [0]
    return (
        solved.squeeze(-1) if is_vector else solved,
        b.new_empty(residuals),
        a.new_empty([0] if driver == "gels" else batch, dtype=torch.int64),
        a.new_empty([*batch, min(rows, columns)] if driver in ("gelsd", "gelss") else [0]),
    )


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Describe a roll as the kernel computes it, one dimension after the other."""
    if not dims:
        return x.new_empty(x.shape)
    if not x.numel():
        return torch.empty_like(x)
    for shift, dim in zip(shifts, dims, strict=True):
        start = -shift % x.shape[dim]
        x = torch.cat([x.narrow(dim, start, x.shape[dim] - start), x.narrow(dim, 0, start)], dim)
    return x


def _contiguous(result: Any, *args: Any, **kwargs: Any) -> Any:
    """Make all results contiguous."""
    if isinstance(result, Tensor):
        return result if result.is_contiguous() else torch.empty_like(result, memory_format=torch.contiguous_format)
    return tree_map_only(Tensor, _contiguous, result) if isinstance(result, tuple | list) else result


def _like_first(result: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Give the first result the memory format that the first argument has, or nearly has."""
    return _formatted(result, x)


def _like_second(result: Any, gradient: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Give the first result the memory format that the second argument has, or nearly has."""
    return _formatted(result, x)


def _like_prediction(position: int) -> Describe:
    """Give a result the strides of the argument at this position."""

    def describe(result: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.empty_like(args[position]) if result.shape == args[position].shape else result

    return describe


def _formatted(result: Any, like: Tensor) -> Any:
    first = result if isinstance(result, Tensor) else result[0]
    if first is not None and first.dim() == like.dim():  # an input that needs no gradient gets none
        new = torch.empty_like(first, memory_format=suggest_memory_format(like))
        first = first if new.stride() == first.stride() else new
    return first if isinstance(result, Tensor) else (first, *result[1:])


def _elementwise(result: Tensor, a: Any, b: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Give a result the strides that a comparison of the arguments has."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return result
    strides = aten.eq.Tensor(a, b).stride()
    return result if strides == result.stride() else result.new_empty_strided(result.shape, strides)


def _rnn_layer(result: Any, *args: Any) -> Any:
    return (*result[:3], result[3].new_empty(1)) if torch.is_grad_enabled() else result


def _rnn_layer_backward(result: Any, *args: Any) -> Any:
    grads = [g if g.dtype == torch.float32 else torch.empty_like(g, dtype=torch.float32) for g in result]
    return (*grads[:4], torch.empty_like(grads[3]), *grads[5:])


def _seeds_on_host(first: int) -> Describe:
    """Put two results on the host, from this position on."""

    def move(result: Any, *args: Any, **kwargs: Any) -> Any:
        seeds = [torch.empty((), dtype=seed.dtype, device="cpu") for seed in result[first : first + 2]]
        return (*result[:first], *seeds, *result[first + 2 :])

    return move


def _whole_storage(result: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if result.stride() == x.stride():  # not so if its elements overlap
        _resize(result, x.untyped_storage().nbytes())
    return result


def _resized(result: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Let the result lie in a storage that was made for the argument."""
    nbytes = x.numel() * result.itemsize
    if result.untyped_storage().nbytes() < nbytes:
        _resize(result, nbytes)
    return result


def _observed(
    result: Any, x: Tensor, observes: Tensor, quantizes: Tensor, least: Tensor, most: Tensor, scale: Tensor,
    zero: Tensor, constant: float, first: int, last: int, axis: int, by_row: bool = False, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    for statistic in (least, most, scale, zero) if by_row else ():
        statistic.resize_(x.shape[axis])
    return result


def _resize(result: Tensor, nbytes: int) -> None:
    """Give a result a storage of this size.

    Raises:
        SizeNeededError: that is a symbol, and a symbolic storage can't be resized.
    """
    storage = result.untyped_storage()
    if not isinstance(nbytes, torch.SymInt) and not isinstance(storage.nbytes(), torch.SymInt):
        storage.resize_(nbytes)
    elif storage.nbytes() != nbytes:
        raise SizeNeededError("a result lies in a larger storage, whose size follows from it")


CPU = ("cpu",)
DESCRIPTIONS = (
    Description(
        ("_grouped_mm.default",),
        "torch describes it for bfloat16 alone, and with rows that are not padded to 16 bytes, as kernels pad them",
        _grouped_mm,
        instead=True,
    ),
    Description(
        ("_ctc_loss.default", "_ctc_loss.Tensor"),
        "its second result is as wide as the longest target, and torch says nothing; with lengths in a tensor it gets "
        "the width that targets may have at most, which `aten_shims` makes the op return",
        _ctc_loss,
        instead=True,
    ),
    Description(
        ("_ctc_loss_backward.default", "_ctc_loss_backward.Tensor"),
        "torch's fakes run it on zeros, which takes a kernel of the GPU and its memory; its result is contiguous",
        _ctc_loss_backward,
        instead=True,
        devices=("cuda",),
    ),
    Description(
        ("_use_cudnn_ctc_loss.default", "_use_cudnn_ctc_loss.Tensor"),
        "torch's fakes run it on zeros on a GPU, where lengths of zero decide otherwise than those of the call",
        _use_cudnn_ctc_loss,
        instead=True,
    ),
    Description(
        ("_use_miopen_ctc_loss.default", "_use_miopen_ctc_loss.Tensor"),
        "torch's fakes run it on zeros on a GPU, as that of cuDNN",
        _use_miopen_ctc_loss,
        instead=True,
    ),
    Description(
        ("linalg_lstsq.default",),
        "torch says nothing, since one result of two drivers depends on the rank; the others are known",
        _lstsq,
        instead=True,
    ),
    Description(
        ("roll.default",),
        "the kernel joins two parts, and keeps channels last; torch says contiguous",
        _roll,
        instead=True,
        devices=CPU,
    ),
    Description(
        ("_log_softmax_backward_data.default", "log_sigmoid_forward.default", "nll_loss2d_forward.default",
         "pow.Scalar"),
        "kernels make contiguous results for any strides; torch keeps the strides",
        _contiguous,
        devices=CPU,
    ),
    Description(
        ("mse_loss_backward.default", "smooth_l1_loss_backward.default", "huber_loss_backward.default"),
        "gradients of losses are contiguous for any strides of the prediction, on each device; torch keeps the strides",
        _contiguous,
    ),
    Description(
        ("binary_cross_entropy.default",),
        "a loss without reduction has the strides of the prediction; torch takes those of the target",
        _like_prediction(0),
    ),
    Description(
        ("binary_cross_entropy_backward.default",),
        "the gradient has the strides of the prediction; torch takes those of the target",
        _like_prediction(1),
    ),
    Description(
        ("native_batch_norm.default", "_native_batch_norm_legit.default", "_native_batch_norm_legit.no_stats",
         "_native_batch_norm_legit_functional.default", "_native_batch_norm_legit_no_training.default",
         "_batch_norm_with_update.default", "_batch_norm_with_update_functional.default",
         "_batch_norm_no_update.default", "native_group_norm.default", "max_unpool2d.default",
         "channel_shuffle.default"),
        "kernels know two formats, contiguous and channels last; torch keeps any strides, or says contiguous",
        _like_first,
        devices=CPU,
    ),
    Description(
        ("native_batch_norm_backward.default", "batch_norm_backward.default", "reflection_pad2d_backward.default",
         "replication_pad2d_backward.default", "native_group_norm_backward.default"),
        "the gradient has the format of the input, contiguous or channels last; torch says otherwise",
        _like_second,
        devices=CPU,
    ),
    Description(
        ("copysign.Tensor", "div.Tensor_mode", "floor_divide.default", "heaviside.default", "lcm.default",
         "gcd.default", "logaddexp.default", "logaddexp2.default", "logical_and.default", "logical_or.default",
         "logical_xor.default", "xlogy.Tensor"),
        "for broadcast arguments whose dimensions have different orders, torch's reference differs from its kernels",
        _elementwise,
    ),
    Description(
        ("_fused_moving_avg_obs_fq_helper.default",),
        "the kernel gives statistics by row the number of rows; torch leaves them as they are",
        _observed,
    ),
    Description(
        ("col2im.default",),
        "the kernel resizes a tensor like its argument, which is larger",
        _resized,
    ),
    Description(
        ("mkldnn_rnn_layer.default",),
        "only oneDNN knows how large the workspace of its backward is, which it makes in grad mode: it is measured",
        _rnn_layer,
    ),
    Description(
        ("mkldnn_rnn_layer_backward.default",),
        "its results are float32 for any dtype, and the two gradients of biases are two tensors; torch's fakes are of "
        "the input's dtype up to 2.12",
        _rnn_layer_backward,
    ),
    Description(
        ("_scaled_dot_product_efficient_attention.default",),
        "backward reads the two seeds of dropout on the host; with seeds on the device the process would crash",
        _seeds_on_host(2),
    ),
    Description(
        ("_efficient_attention_forward.default",),
        "backward reads the two seeds of dropout on the host; with seeds on the device the process would crash",
        _seeds_on_host(2),
    ),
    Description(
        tuple(str(op).removeprefix("aten.") for op in COPY_STORAGES),
        "a functional write into a view copies the whole storage, not only what the view covers",
        _whole_storage,
    ),
)  # fmt: skip


def _described() -> Iterator[tuple[OpOverload, Description]]:
    """Look up the ops that this torch has."""
    for description in DESCRIPTIONS:
        for name in description.ops:
            packet, overload = name.rsplit(".", 1)
            op = getattr(getattr(aten, packet, None), overload, None)
            if op is not None:
                yield op, description


DESCRIBED = dict(_described())
