"""Python state of forward while it is captured: Python's own random numbers.

draw_in_graph   draws with `random` and numpy as ops of the graph
drawn_values    numbers and arrays that stand for what was drawn
"""
