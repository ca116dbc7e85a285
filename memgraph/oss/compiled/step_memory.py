"""Add to a trace what a sharded optimizer keeps on a rank and what its step allocates.

    AdamW over 25.3M parameters, 2 ranks  ->  states 101.2 MB, workspace of the update 8.4 MB and that of buckets
    with offloaded states                 ->  workspace of its windows, and that of buckets

The caller's optimizer steps on fake shards, as `memgraph/optim/optimizer_profiler.py` does with parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from passes import Trace
from passes.ir.machine import CAST_WORKSPACE, SMALLEST_STREAMED

from ...optim.kernel_text import plain_attributes
from ...optim.optimizer_profiler import OptimizerProfiler, update_nbytes
from ...optim.trained_parameters import Owner, TrainedParameters, is_large
from ...optim.trial_copy import copy_with
from ...optim.update_cost import add_update_op
from ...optim.update_operands import no_parameters
from ...optim.window_memory import OffloadedTensors, window_bytes
from ..optimizer import OSS
from ..shards.layout import ShardLayout
from ..shards.param_groups import Group, options
from ..shards.shard_views import BucketViews
from ..step import AHEAD

FLAGS = 64, 48  # bytes for each parameter before a step: once, and for each rank
CHECKED = 4  # bytes for each byte of a tensor whose range is checked
_updates: dict[object, tuple[int, int]] = {}  # by the kind of a bucket
_windows: dict[object, int] = {}


def add_sharded_update(trace: Trace, oss: OSS, trained: TrainedParameters) -> Trace:
    """Return the trace with this rank's states as inputs and its part of the update as the last op.

    All that is trained has a gradient then. A call without gradients has no update behind it: that would average all
    gradients, which takes more than any step. The states of a bucket, which may be offloaded, are a value, as large
    as on the rank with most of them.
    """
    buckets, reduced = oss.layout.buckets, trained.shards
    if oss.layout.splits:
        updates = [_update_nbytes(oss, bucket) for bucket in buckets]
        states = sum(nbytes for nbytes, _ in updates)
        workspace = _step_nbytes(oss, [update for _, update in updates], reduced)
    else:
        states, update = _whole_update_nbytes(oss, trained.parameters)
        workspace = _whole_step_nbytes(oss, update, reduced)
    sizes = [*trained.states.values()]
    states += sum(sizes) - _own_nbytes(oss, trained.states)
    return add_update_op(trace, type(oss.inner).__name__, states, workspace if trained.parameters else 0, sizes)


def largest_update_nbytes(oss: OSS, parameters: Collection[Tensor]) -> tuple[int, int]:
    """Return the most that a rank keeps in states, and that an update takes, with these parameters of an optimizer."""
    ids = set(map(id, parameters))
    groups = [group | {"params": [p for p in group["params"] if id(p) in ids]} for group in oss.param_groups]
    each = [_share_nbytes(_share(oss, groups, rank)) for rank in range(oss.comm.ranks)]
    return max(states for states, _ in each), max(workspace for _, workspace in each)


def _share(oss: OSS, groups: list[Group], rank: int) -> OSS:
    """Return the optimizer as it would be on another rank, with other groups; it is only looked at."""
    layout = ShardLayout(rank, oss.comm.ranks, oss.layout.bucket_bytes, oss.layout.splits, oss.layout.owners)
    for i, group in enumerate(groups):
        layout.add_group(i, group)
    share = object.__new__(OSS)
    vars(share).update(vars(oss) | {"layout": layout, "param_groups": groups})
    return share


def _share_nbytes(oss: OSS) -> tuple[int, int]:
    if not oss.layout.splits:
        states, update = _whole_update_nbytes(oss, oss.layout.parameters)
        return states, _whole_step_nbytes(oss, update, ())
    updates = [_update_nbytes(oss, bucket) for bucket in oss.layout.buckets]
    return sum(nbytes for nbytes, _ in updates), _step_nbytes(oss, [update for _, update in updates], ())


def _own_nbytes(oss: OSS, states: Collection[Owner]) -> int:
    by_bucket = enumerate(large_state_nbytes(oss) if states else ())
    return sum(of_ranks[oss.comm.rank] for i, of_ranks in by_bucket if i in states)


def offloaded_nbytes(oss: OSS, reduced: Collection[int]) -> int:
    """Return the most that an update allocates, whichever states are offloaded; backward averages `reduced` buckets."""
    updates = [max(_update_nbytes(oss, bucket)[1], _window_nbytes(oss, bucket)) for bucket in oss.layout.buckets]
    return _step_nbytes(oss, updates, reduced)


def _step_nbytes(oss: OSS, updates: Sequence[int], reduced: Collection[int]) -> int:
    """Return what a step allocates if the update of each bucket takes so much."""
    buckets = oss.layout.buckets
    gathers = [gather_nbytes(oss, bucket) for bucket in buckets]
    at_end = oss.comm.wire is torch.float16  # all buckets are gathered at the end
    turns = _turns(_averages_nbytes(oss, reduced), updates, [0] * len(buckets) if at_end else gathers)
    return max(*map(sum, turns), sum(gathers) * at_end, 0) + _flags_nbytes(oss)


def _whole_step_nbytes(oss: OSS, update: int, reduced: Collection[int]) -> int:
    """Return what a step allocates if all shards are updated at once."""
    gathers = sum(gather_nbytes(oss, bucket) for bucket in oss.layout.buckets)
    return sum(_averages_nbytes(oss, reduced)) + max(update, gathers) + _flags_nbytes(oss)


def _flags_nbytes(oss: OSS) -> int:
    nbytes = (FLAGS[0] + FLAGS[1] * oss.comm.ranks) * (1 + len(oss.layout.parameters))
    if oss.comm.wire is not None:
        nbytes += CAST_WORKSPACE
    if oss.comm.wire is torch.float16:
        nbytes += CHECKED * max(parameter.nbytes for parameter in oss.layout.parameters)
    return nbytes


def _turns(averages: Sequence[int], updates: Sequence[int], gathers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield what is allocated while each bucket is updated: for it, the next ones averaged, and the last ones
    gathered."""
    for i, update in enumerate(updates):
        yield *averages[i : i + AHEAD + 1], *gathers[max(0, i - AHEAD) : i], max(update, gathers[i])


def _update_nbytes(oss: OSS, bucket: BucketViews) -> tuple[int, int]:
    """Return the bytes of the states of this rank's shards of a bucket, and of the workspace of their update."""
    group, key = _own_group(oss, bucket)
    if key not in _updates:
        _updates[key] = update_nbytes(copy_with(oss.inner, [group]))
    return _updates[key]


def _window_nbytes(oss: OSS, bucket: BucketViews) -> int:
    """Return the workspace of an update in windows: the most of the next one and of later ones."""
    group, key = _own_group(oss, bucket)
    window = oss.offloaded_shards.window
    if not oss.offloaded_shards.can_stream or not group["params"]:
        return 0
    key = key, window
    if key not in _windows:
        parts = OffloadedTensors(no_parameters, no_parameters, is_large)
        nbytes = window_bytes(copy_with(oss.inner, [group]), window, parts, group["params"])
        _windows[key] = max(each.total for each in nbytes)
    return _windows[key]


def _own_group(oss: OSS, bucket: BucketViews) -> tuple[Group, object]:
    """Return a group of this rank's shards of a bucket as trained parameters, and a key that equal buckets share."""
    parameters = oss.layout.parameters
    views = [view for one, view in bucket.own if parameters[one.param].requires_grad or view in oss.inner.state]
    group = options(oss.param_groups[oss.layout.group_of[bucket.bucket.params[0]]])
    kinds = tuple((view.shape, view.dtype, view.device) for view in views)
    key = oss.optimizer_class, repr(group), repr(plain_attributes(oss.inner)), kinds
    return group | {"params": list(map(_as_trained, views))}, key


def _whole_update_nbytes(oss: OSS, trained: Collection[Tensor]) -> tuple[int, int]:
    """Return the bytes of the states of all of this rank's shards, and of the workspace of one update of all."""
    ids, parameters, certain = set(map(id, trained)), oss.layout.parameters, list[Tensor]()
    groups: list[list[Tensor]] = [[] for _ in oss.param_groups]
    for shard, view in oss.layout.own_shards():
        parameter = parameters[shard.param]
        if parameter.requires_grad or view in oss.inner.state:
            stepped = _as_trained(view)
            groups[oss.layout.group_of[shard.param]].append(stepped)
            certain += [stepped] if id(parameter) in ids else []
    given = [options(group) | {"params": views} for group, views in zip(oss.param_groups, groups, strict=True)]
    return update_nbytes(copy_with(oss.inner, given), certain)


def _as_trained(view: Tensor) -> Tensor:
    return view.detach().requires_grad_()


def _averages_nbytes(oss: OSS, reduced: Collection[int]) -> list[int]:
    return [0 if bucket.number in reduced else _average_nbytes(oss, bucket) for bucket in oss.layout.buckets]


def _average_nbytes(oss: OSS, bucket: BucketViews) -> int:
    others, part = oss.comm.ranks - 1, _part_nbytes(oss, bucket)
    if oss.averager.replicated:
        return 0
    if _reads_memory(oss):
        return (2 + _is_packed(bucket)) * part
    if oss.layout.device.type != "cpu":
        return (others + 2) * part + _copies(oss) * (others + 1) * part
    return (others + (2 * others + 2) * _is_packed(bucket) + 2 * (oss.comm.wire is not None)) * part


def gather_nbytes(oss: OSS, bucket: BucketViews) -> int:
    others, part = oss.comm.ranks - 1, _part_nbytes(oss, bucket)
    if not others or _reads_memory(oss):
        return 0
    if oss.layout.device.type != "cpu":
        return (others + 2) * part + _copies(oss) * (others + 1) * part
    return (others + 1) * (_is_packed(bucket) + (oss.comm.wire is not None)) * part


def _reads_memory(oss: OSS) -> bool:
    return oss.comm.shared_memory is not None and oss.layout.is_dense_on_cpu


def _is_packed(bucket: BucketViews) -> bool:
    return any(len(of_rank) > 1 for of_rank in bucket.stretches)


def _copies(oss: OSS) -> bool:
    return bool(dist.get_backend(oss.comm.group) == "gloo")


def _part_nbytes(oss: OSS, bucket: BucketViews) -> int:
    return bucket.bucket.shard_size * oss.layout.parameters[bucket.bucket.params[0]].element_size()


def movable_shard_states(oss: OSS) -> dict[Owner, int]:
    """Return the bytes of the states of each bucket that may be offloaded: the same on all ranks."""
    if not oss.offloaded_shards.can_stream:
        return {}
    return {i: most for i, of_ranks in enumerate(large_state_nbytes(oss)) if (most := max(of_ranks))}


def large_state_nbytes(oss: OSS) -> list[list[int]]:
    """Return the bytes of states that may be offloaded, for each bucket and rank: those of trained, large shards."""
    per_element, layout = _state_nbytes_per_element(oss), oss.layout
    nbytes = []
    for bucket in layout.buckets:
        group, of_ranks = layout.group_of[bucket.bucket.params[0]], [0] * oss.comm.ranks
        for shard in bucket.bucket.shards:
            parameter = layout.parameters[shard.param]
            if parameter.requires_grad and shard.count * parameter.element_size() >= SMALLEST_STREAMED:
                of_ranks[shard.rank] += shard.count * per_element[group, parameter.dtype]
        nbytes.append(of_ranks)
    return nbytes


def _state_nbytes_per_element(oss: OSS) -> dict[tuple[int, torch.dtype], int]:
    """Return the bytes of states for an element of a parameter of each group and dtype."""
    given = [options(group) | {"params": list(group["params"])} for group in oss.param_groups]
    profiler = OptimizerProfiler(copy_with(oss.inner, given))
    kinds = {(group, p.dtype) for group, p in zip(oss.layout.group_of, oss.layout.parameters, strict=True)}
    return {kind: profiler.element_nbytes(*kind, oss.layout.device) for kind in kinds}
