"""The linear program: a lower bound on the time of any plan, and a solution to round.

problem           the storages and producers of a trace as numbers
state_vars        parameters, gradients and optimizer states that may be offloaded
columns           what a plan decides, and what it costs
model             the mathematics, and the rows for availability
memory_rows       the bytes at an op fit the budget
bandwidth_rows    the bytes that a link carries by an op
state_rows        offloaded state: its bytes, its copies, its updates
relax             solve, adding rows that are broken
rounding          solution -> placements
solver            HiGHS
linear_program    a linear program: columns and rows
verify_bound      derive a bound from dual values of the linear program, without a solver and in exact arithmetic
"""
