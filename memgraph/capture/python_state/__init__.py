"""What forward does with Python's own random numbers, while it is captured.

draw_in_graph   draws with `random` and numpy as ops of the graph
drawn_values    numbers and arrays that stand for what was drawn
"""
