"""The two modules of a step: forward and backward.

partition       joint graph -> forward and backward GraphModule
term_layouts    strides of what a sum is left with
direct_calls    their code calls ops by what runs them
"""
