"""The sharded optimizer (ZeRO stage 1): each rank updates, and holds the state of, its share of the elements.

    optimizer             OSS, a torch.optim.Optimizer over flat buckets
    step                  average gradients, update shards, gather parameters, bucket by bucket
    average_grads         reduce gradients to the ranks that own their elements
    sharded_grads         gradients that a compiled module reduces inside its backward
    pending_gathers       updated parameters that the next forward gathers
    held_gradients        averaged gradients that wait for a step
    clip_norm             clip by the norm over all ranks
    grad_presence         which parameters have gradients, on all ranks
    sparse                sparse gradients
    interrupted           resume a step that a full disk has interrupted
    grad_scaler           a GradScaler with one scale on all ranks
    closure_optimizers    optimizers that call their closure several times (LBFGS)
    offloaded_states      optimizer states of shards on disk

`shards` cuts parameters into buckets and shards, `comm` moves them between ranks, `compiled` puts the collectives into
the graph of a compiled module, `checkpoint` saves and loads.
"""

from .grad_scaler import GradScaler
from .optimizer import OSS
from .sharded_checkpoint import load_sharded, save_sharded

__all__ = ["OSS", "GradScaler", "load_sharded", "save_sharded"]
