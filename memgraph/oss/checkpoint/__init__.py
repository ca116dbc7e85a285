"""Save and load the state of a sharded optimizer, on any number of ranks.

own_state         the states of this rank's shards
state_dict        state dicts of the optimizer that steps on shards, and its installation on all ranks
full_state        gather the state that the plain optimizer would have
sharded_state     the state as DTensors, for torch.distributed.checkpoint
state_outline     a state as text and tensors
training_folder   a training in a folder: one way for one process, shards and stages
checkpoint_folder a folder of all ranks, which is replaced whole or not at all
"""
