"""What a sharded optimizer keeps on a rank and what its step allocates there, in the text of a step.

    AdamW over 25.3M parameters, 2 ranks  ->  states 101.2 MB, workspace of the update 8.4 MB and that of buckets
    with states that live far             ->  workspace of its windows, and that of buckets

The caller's optimizer is stepped on made-up pieces, as `memgraph/optim/optimizer_profiler.py` does with parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from passes import Trace
from passes.ir.wire import WORKSPACE

from ...optim.optimizer_clone import clone_optimizer, plain_attributes
from ...optim.optimizer_profiler import update_nbytes
from ...optim.state_parts import StatePart, TrainedParameters, is_large
from ...optim.update_cost import add_update_op
from ...optim.update_operands import no_parameters
from ...optim.window_memory import OffloadedTensors, window_bytes
from ..offloaded_states import large_nbytes
from ..optimizer import OSS
from ..shards.param_groups import Group, options
from ..shards.shard_views import BucketViews
from ..step import AHEAD

FLAGS = 64, 48  # bytes for what is said of each parameter before a step, and for what each rank says
TRIED = 4  # bytes for each byte of a tensor that is tried
_known: dict[object, tuple[int, int]] = {}  # of pieces that are alike
_windows: dict[object, int] = {}


def add_sharded_update(trace: Trace, oss: OSS, trained: TrainedParameters) -> Trace:
    """The trace with this rank's states among its inputs and its part of the update as its last op.

    All that is trained has a gradient then. Behind a call that makes no gradient comes no update: all would be averaged
    in it, which takes more than any step. Each part of the states, which may live in the far tier, is a value of its
    own, with the bytes of the rank that has most of it.
    """
    laid, inside, parts = oss.pieces.laid, trained.shards, trained.parts
    if oss.is_cut:
        steps = [_bucket_nbytes(oss, one) for one in laid]
        states = sum(nbytes for nbytes, _ in steps)
        taken = _step_nbytes(oss, [update for _, update in steps], inside)
    else:
        states, update = _all_nbytes(oss, trained.parameters)
        averaged = sum(_averaged_nbytes(oss, inside))
        taken = averaged + max(update, sum(gathered_nbytes(oss, one) for one in laid)) + _told_nbytes(oss)
    sizes = [part.nbytes for part in parts]
    rest = states - _apart_nbytes(oss, parts)
    return add_update_op(trace, type(oss.inner).__name__, rest + sum(sizes), taken if trained.parameters else 0, sizes)


def _apart_nbytes(oss: OSS, parts: Sequence[StatePart]) -> int:
    """Bytes that this rank has of states in parts."""
    apart = {owner for part in parts for owner in part.owners}
    each = enumerate(large_nbytes(oss) if parts else ())
    return sum(of_ranks[oss.exchange.rank] for i, of_ranks in each if i in apart)


def offloaded_nbytes(oss: OSS, inside: Collection[int]) -> int:
    """What an update takes at most, whatever states live far."""
    updates = [max(_bucket_nbytes(oss, one)[1], _windows_nbytes(oss, one)) for one in oss.pieces.laid]
    return _step_nbytes(oss, updates, inside)


def _step_nbytes(oss: OSS, updates: Sequence[int], inside: Collection[int]) -> int:
    """What a step takes, bucket by bucket, if the update of each takes so much."""
    laid = oss.pieces.laid
    gathered = [gathered_nbytes(oss, one) for one in laid]
    late = oss.exchange.wire is torch.float16  # all buckets are gathered in the end
    turns = _turns(_averaged_nbytes(oss, inside), updates, [0] * len(laid) if late else gathered)
    return max(*map(sum, turns), sum(gathered) * late, 0) + _told_nbytes(oss)


def _told_nbytes(oss: OSS) -> int:
    """What is taken for flags, and by casts for the wire."""
    taken = (FLAGS[0] + FLAGS[1] * oss.exchange.ranks) * (1 + len(oss.pieces.parameters))
    if oss.exchange.wire is not None:
        taken += WORKSPACE
    if oss.exchange.wire is torch.float16:  # of which it is tried whether it takes the numbers
        taken += TRIED * max(parameter.nbytes for parameter in oss.pieces.parameters)
    return taken


def _turns(averaged: Sequence[int], updates: Sequence[int], gathered: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """For each bucket what is there while it is updated, and then gathered: the next ones are averaged, and the last
    ones are gathered."""
    for i, update in enumerate(updates):
        yield *averaged[i : i + AHEAD + 1], *gathered[max(0, i - AHEAD) : i], max(update, gathered[i])


def _bucket_nbytes(oss: OSS, laid: BucketViews) -> tuple[int, int]:
    """Bytes of the states of a bucket's own pieces, and what their update takes."""
    group, key = _own_group(oss, laid)
    if key not in _known:
        _known[key] = update_nbytes(clone_optimizer(oss.inner, [group]))
    return _known[key]


def _windows_nbytes(oss: OSS, laid: BucketViews) -> int:
    """What the update of a bucket's own pieces takes in windows: the most of the next and of later ones."""
    group, key = _own_group(oss, laid)
    if not oss.far.can_stream or not group["params"]:
        return 0
    key = key, oss.far.window
    if key not in _windows:
        far = OffloadedTensors(no_parameters, no_parameters, is_large)
        taken = window_bytes(clone_optimizer(oss.inner, [group]), oss.far.window, far, group["params"])
        _windows[key] = max(one.total for one in taken)
    return _windows[key]


def _own_group(oss: OSS, laid: BucketViews) -> tuple[Group, object]:
    """A bucket's own pieces as parameters that have gradients, in a group; and what buckets have in common that are
    alike."""
    first, parameters = laid.bucket.items[0], oss.pieces.parameters
    views = [view for piece, view in laid.own if parameters[piece.item].requires_grad or view in oss.inner.state]
    group = options(oss.param_groups[oss.group_of[first]])
    forms = tuple((view.shape, view.dtype, view.device) for view in views)
    key = oss.optim, repr(group), repr(plain_attributes(oss.inner)), forms
    return group | {"params": list(map(_trained, views))}, key


def _all_nbytes(oss: OSS, trained: Collection[Tensor]) -> tuple[int, int]:
    """Bytes of the states of all own pieces, and what their update takes, all at once."""
    ids, parameters, sure = set(map(id, trained)), oss.pieces.parameters, list[Tensor]()
    groups: list[list[Tensor]] = [[] for _ in oss.param_groups]
    for piece, view in (one for laid in oss.pieces.laid for one in laid.own):
        parameter = parameters[piece.item]
        if parameter.requires_grad or view in oss.inner.state:
            stepped = _trained(view)
            groups[oss.group_of[piece.item]].append(stepped)
            sure += [stepped] if id(parameter) in ids else []
    given = [options(group) | {"params": views} for group, views in zip(oss.param_groups, groups, strict=True)]
    return update_nbytes(clone_optimizer(oss.inner, given), sure)


def _trained(view: Tensor) -> Tensor:
    """A view as a parameter that has gradients."""
    return view.detach().requires_grad_()


def _averaged_nbytes(oss: OSS, inside: Collection[int]) -> list[int]:
    """What each bucket takes while a step averages it; nothing, if backward has done so."""
    return [0 if i in inside else _averaging_nbytes(oss, one) for i, one in enumerate(oss.pieces.laid)]


def _averaging_nbytes(oss: OSS, laid: BucketViews) -> int:
    """What a bucket takes while it is averaged: what comes from others, and copies of what is no single stretch."""
    others, part = oss.exchange.ranks - 1, _part_nbytes(oss, laid)
    if oss.are_same:
        return 0
    if oss.neighbours is not None:
        return (2 + _several(laid)) * part
    if not _on_cpu(oss):
        return (others + 2) * part + _copied(oss) * (others + 1) * part
    return (others + (2 * others + 2) * _several(laid) + 2 * _cast(oss)) * part


def gathered_nbytes(oss: OSS, laid: BucketViews) -> int:
    """What a bucket takes while it is gathered: where it is packed and received, if it does not lie in one piece."""
    others, part = oss.exchange.ranks - 1, _part_nbytes(oss, laid)
    if not others or oss.neighbours is not None:
        return 0
    if not _on_cpu(oss):
        return (others + 2) * part + _copied(oss) * (others + 1) * part
    return (others + 1) * (_several(laid) + _cast(oss)) * part


def _several(laid: BucketViews) -> bool:
    """Whether it has to be put together to be sent."""
    return any(len(of_rank) > 1 for of_rank in laid.stretches)


def _cast(oss: OSS) -> bool:
    return oss.exchange.wire is not None


def _copied(oss: OSS) -> bool:
    """Whether a collective copies what it is given: gloo does."""
    return bool(dist.get_backend(oss.exchange.group) == "gloo")


def _on_cpu(oss: OSS) -> bool:
    return oss.pieces.device.type == "cpu"


def _part_nbytes(oss: OSS, laid: BucketViews) -> int:
    return laid.bucket.part * oss.pieces.parameters[laid.bucket.items[0]].element_size()
