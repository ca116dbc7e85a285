"""What memgraph costs and spares: each module is a command, `python -m benchmarks.NAME`."""
