"""Slices of a captured step: ops that run in parts of the rows.

step_cuts       what is tried in parts, in its order
step_slices     the step in slices: what `slices=` asks for
step_blocks     the step with large weights in blocks of rows
row_facts       rules by which ops run on some of their rows
linear_reads    in which of its reads an op is linear
row_losses      losses over classes, row by row
sliced_graph    the graph that runs a sliced trace
weights         weights that can be read in blocks
row_blocks      the graph that reads weights in blocks
equal_bits      whether blocks have the bits of the whole, tried on the device
slice_ops       the ops that slices and blocks add
"""
