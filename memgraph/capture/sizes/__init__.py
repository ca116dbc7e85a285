"""Captures in which lengths are symbols, so that one serves calls of many lengths.

size_inputs    the sizes of a call that are symbols
size_capture   capture with symbols, and compare with an earlier capture of another length
same_capture   whether two captures are equal
at_lengths     numbers in the place of symbols: the capture of another length
later_graph    a graph module whose graph is made when it is first read
"""
