"""Facts about tensors.

buckets         pad batches to a few lengths
layout          tensors that fill one run of memory
aliasing        tensors that share memory
loss_outputs    outputs that a loss may be made of
pytree          nested containers of tensors
traced_float    stand-ins for Python floats while a call is traced
traced_size     symbols for sizes while a call is traced
versions        in-place changes since a version was read
"""
