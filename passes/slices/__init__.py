"""Slices: chains of ops that run in parts, each on some of the rows.

row_rule     a rule by which an op runs on some of its rows
chain        find the ops around a large value that can run on rows together
part_rows    the rows of each part
slice        Slice: a decision; it prints and parses back
hoist        backward ops that run in forward, with a tangent of 1
blocks       the blocks in which a chain runs
parts        the ops of a block, once for each part
unroll       the trace in which a slice is carried out
choose       which chains, in how many parts
row_blocks   which weights come in blocks of rows, and of how many
whole_step   the plan without slices, if it is the faster one
whole_weight why a weight stays whole
"""
