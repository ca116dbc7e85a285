"""Steps of many lengths from one with symbols: what does not depend on sizes is done once.

step_at_length  the step of a call, made of one with symbols
general_steps   the steps with symbols of one capture
general_graph   the graph of such a step -> the text of one length, its distinct ops, and code for its plans
"""
