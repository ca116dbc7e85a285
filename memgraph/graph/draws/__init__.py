"""Draws with Python's own generators, in the graph of a step.

host_draws   draws with `random` and numpy as ops
first_draws  coins before all other ops
"""
