"""The parameters, gradients and states that a rank of a pipeline keeps between steps.

stage_tensors.py: parameters and buffers
deferred_batch_norm.py: running statistics of whole mini-batches
clip_norm.py: the norm of the gradients of all stages
random_numbers.py: generators that draw what the plain model would
draw_counts.py: how many numbers ops draw
stage_updates.py: the optimizer of each stage, and its bytes
stage_state_dict.py: state dicts of a model in stages
stage_checkpoint.py: the states of a stage's optimizer in a checkpoint folder
"""
