"""Draws with Python's own generators, and states of torch's, in the graph of a step.

host_draws         draws with `random` and numpy as ops
generator_states   reads and writes of the state of torch's generator as ops
"""
