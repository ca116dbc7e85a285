"""The command line: `memgraph plan`, `sweep`, `show`, `diff`, `explain`, `verify`, `doctor`, `demo`."""
