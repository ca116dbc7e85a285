"""Memgraph beside torch's own ways to save memory, with a history for each machine: `python -m benchmarks.peers`.

steps.py: a step of one way, in a process of its own
row.py: a peer beside eager, and memgraph at its peak; the table
history.py: rows of earlier runs on this machine, and what changed since, in words
plot.py: the history as an SVG
"""
