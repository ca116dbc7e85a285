"""`python -m memgraph`, where the command is not on the PATH."""

import sys

from .command.app import main

sys.exit(main())
