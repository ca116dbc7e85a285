"""Save and load the state of a sharded optimizer, on any number of ranks.

state_dict        OSS.state_dict() and load_state_dict()
full_state        gather the state that the plain optimizer would have
sharded_state     the state as DTensors, for torch.distributed.checkpoint
folder            a checkpoint folder that is replaced atomically
room              buffers to read a checkpoint into
validate_state    check a state dict before anything is changed
first_state       the state that a first step creates, to compare a loaded one with
state_outline     a state as text and tensors
reshard           convert between shards and DTensor rows
courier, copies   move tensors to the rank that asked, and make room for copies
"""
