"""Triton kernels for a GPU, each with a fallback in torch that gives the same bits.

cast       float32 to bfloat16 and back, for values that are offloaded

The tests run the kernels under Triton's interpreter, and on a GPU where there is one. Nothing is imported here: Triton
takes half a second to import, and a CPU does not need it.
"""
