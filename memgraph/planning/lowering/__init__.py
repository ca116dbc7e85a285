"""Compile parts of a planned graph with Inductor.

lowering    segments: ops between products, and the step with those that are used
"""
