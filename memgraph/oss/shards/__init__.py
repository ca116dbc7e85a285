"""Cut parameters into buckets, and buckets into the shards of the ranks.

shard_views          views of this rank's elements of each parameter
param_groups         parameter groups as the caller gave them
arguments            the arguments of OSS, checked
placeholder_grads    what stands in .grad while the gradient is sharded
"""
