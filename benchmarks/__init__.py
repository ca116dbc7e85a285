"""Benchmarks of memgraph's cost and savings; each module is a command: `python -m benchmarks.NAME`."""
