"""Facts about tensors.

buckets           pad batches to a few lengths
layout            tensors that fill one run of memory
aliasing          tensors that share memory
loss_outputs      outputs that a loss may be made of
parameter_groups  the parameters of an optimizer, and the group of each
pytree            nested containers of tensors
traced_number     stand-ins for Python numbers while a call is traced
traced_size       symbols for sizes while a call is traced
expressions       arithmetic on numbers that are known later
gradients         the gradients that parameters have
differentiable    tensors through which autograd passes a gradient
versions          in-place changes since a version was read
counted_number    a number with which forward counts, and its formula
state_leaves      the tensors in the state of a parameter, however deep
"""
