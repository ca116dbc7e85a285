"""The sharded optimizer (ZeRO stage 1): each rank updates its share of the elements, and keeps their state.

    optimizer             OSS, a torch.optim.Optimizer over flat buckets; creates all other parts
    step                  average gradients, update shards, gather parameters, bucket by bucket
    average_grads         average gradients, dense or sparse, for the ranks that own their elements
    sharded_grads         gradients that a compiled module reduces inside its backward
    pending_gathers       updated parameters that the next forward gathers
    clip_norm             clip by the norm over all ranks, and keep the averages for the next step
    grad_presence         which parameters have gradients, on all ranks
    grad_scaler           a GradScaler with one scale on all ranks
    closure_optimizers    optimizers that call their closure several times (LBFGS)
    offloaded_states      optimizer states of shards on disk
    sharded_part          these states in a checkpoint folder

`shards` cuts parameters into buckets and shards, `comm` moves them between ranks, `compiled` puts the collectives into
the graph of a compiled module, `checkpoint` converts states. A part takes the layout, the comm and the parts that it
uses; only `optimizer` and what stands above it know the whole.
"""

from .grad_scaler import GradScaler
from .optimizer import OSS
from .pending_gathers import PendingGathers
from .sharded_grads import ShardedGradients

__all__ = ["OSS", "GradScaler", "PendingGathers", "ShardedGradients"]
