"""The command line: `memgraph plan`, `fit`, `sweep`, `show`, `diff`, `explain`, `verify`, `doctor`, `demo`."""
