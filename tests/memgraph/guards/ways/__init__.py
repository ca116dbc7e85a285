"""Ways to read state of Python in forward.

way      a way, and how it ends
of_*     the ways
table    all of them, as docs/python-state.md shows them
"""
