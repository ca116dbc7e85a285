"""Facts about tensors.

layout      tensors that fill one run of memory
aliasing    tensors that share memory
pytree      nested containers of tensors
versions    in-place changes since a version was read
"""
