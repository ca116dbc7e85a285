"""Cut parameters into buckets, and buckets into the shards of the ranks.

layout            buckets and shards of all parameters of an optimizer
shard_views       views of one bucket; placeholder gradients
shard_optimizer   the caller's optimizer class, which steps on this rank's shards
param_groups      arguments and parameter groups, checked and copied
"""
