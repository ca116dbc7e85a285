"""Start the command `memgraph`: a line on stderr at once, then the imports, which take seconds.

    memgraph plan train.py:setup --budget 8GB   ->   memgraph: loading torch        after 0.1 s
                                                     memgraph: loading train.py:setup

It is a package of its own, since each module of `memgraph` imports torch before its first line runs.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130
HELP = {"-h", "--help"}


def main() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        if len(sys.argv) > 1 and HELP.isdisjoint(sys.argv):
            print("memgraph: loading torch", file=sys.stderr, flush=True)
        from memgraph.command.app import main as run
    except KeyboardInterrupt:
        print("memgraph: interrupted", file=sys.stderr)
        return INTERRUPTED
    return run()
