"""The linear program: a lower bound on the time of any plan, and a point to round.

problem           the storages and ops as numbers
model             columns and objective
rows              availability: what an op reads is there
memory_rows       the bytes at an op fit the budget
transient_rows    bytes that a recomputation holds while it runs
bandwidth_rows    the bytes that a link carries by an op
state_vars, state_rows  parameters, gradients and states that may be offloaded
occupancy         bytes that a point puts at every op
relax             solve with lazy rows
solver            HiGHS
rounding          point -> placement
repeated          the same for steps with many equal layers
"""
