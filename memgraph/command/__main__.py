"""`python -m memgraph.command`, where the command is not on the PATH."""

import sys

from .app import main

sys.exit(main())
