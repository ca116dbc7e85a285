"""Slices of a captured step: ops that run in parts of the rows.

step_cuts       what is tried in parts, in its order
step_slices     the step in slices: what `slices=` asks for
step_blocks     the step with large weights in blocks of rows
row_facts       rules by which ops run on some of their rows
linear_reads    in which of its reads an op is linear
sliced_graph    the graph that runs a sliced trace
weights         weights that can be read in blocks
slice_ops       the ops that slices and blocks add
"""
