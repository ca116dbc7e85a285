"""Captures in which floats of a call are inputs, so that one serves calls with other numbers.

float_inputs     stand-ins for the floats, while the call is traced
float_capture    capture with these, and compare with a capture in which they are constants
type_checks      find code that checks the type or identity of a number
"""
