"""Put the collectives of a sharded optimizer into the graph and the plan of a compiled module.

insert_reduce_scatter    reduce gradients in backward, bucket by bucket
insert_all_gather        gather updated parameters in forward, bucket by bucket
step_memory              bytes that the sharded optimizer keeps and its step allocates
joint_planning           plan one step on all ranks: same trace, same prices, same plan
"""
