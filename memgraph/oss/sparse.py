"""Sparse gradients: their rows, from all ranks to the owner of the parameter.

    rank 0: rows 3, 5     rank 1: rows 5, 8     ->   on the owner: rows 3, 5, 8, those of 5 added

Optimizers that update only the rows of a sparse gradient see which rows some rank has touched.
"""

from __future__ import annotations

import torch
from torch import Tensor, optim

from ..errors import ShardError
from .comm.exchange import BucketComm

DENSIFIED = (optim.SGD, optim.Adagrad)  # a row of zeros changes nothing in these, as a row that is missing


def refuse_sparse(kind: type[optim.Optimizer]) -> None:
    """Raise if pieces of a sparse gradient are not what an optimizer that is cut would have taken.

    Raises:
        ShardError: the plain optimizer refuses sparse gradients, too.
    """
    if kind not in DENSIFIED:
        raise ShardError(f"{kind.__name__} does not support sparse gradients, please consider SparseAdam instead")


def average_sparse(exchange: BucketComm, parameter: Tensor, owner: int) -> Tensor | None:
    """The mean of a sparse gradient over ranks, for the owner."""
    local = _coalesced(parameter)
    device = parameter.device
    counts = [float(local._nnz()), float(local.sparse_dim())] if local is not None else [0.0, 0.0]
    table = exchange.each(exchange.numbers(counts, torch.float64, device)).long()
    dims = int(table[:, 1].max())
    if exchange.rank != owner:
        if local is not None and local._nnz():
            exchange.pairs.send([local.indices(), local.values()], owner)
        return None
    parts = []
    for rank in range(exchange.ranks):
        count = int(table[rank, 0])
        if rank == owner and local is not None:
            parts.append((local.indices(), local.values()))
        elif rank != owner and count:
            indices = torch.empty(dims, count, dtype=torch.int64, device=device)
            values = torch.empty(count, *parameter.shape[dims:], dtype=parameter.dtype, device=device)
            exchange.pairs.receive([indices, values], rank)
            parts.append((indices, values))
    indices, values = (torch.cat(some, dim) for some, dim in zip(zip(*parts, strict=True), (1, 0), strict=True))
    total = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()
    return total.div_(exchange.ranks)


def _coalesced(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    return (gradient.detach() if gradient.is_sparse else gradient.detach().to_sparse()).coalesce()
