"""Slices of a captured step: ops that run in parts of the rows.

step_slices     the step in slices: what `slices=` asks for
row_facts       rules by which ops run on some of their rows
linear_reads    in which of its reads an op is linear
row_losses      losses over classes, row by row
sliced_graph    the graph that runs a sliced trace
slice_ops       the op that scales what ran with a tangent of 1
"""
