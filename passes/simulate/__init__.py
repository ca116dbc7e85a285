"""Say what a planned step takes: the one simulator that has the last word.

forecast    bytes at every op, time on every queue
choice      a plan beside the step it was made for, and its proven bound
"""
