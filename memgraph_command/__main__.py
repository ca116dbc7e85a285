"""`python -m memgraph_command`, where the command is not on the PATH."""

import sys

from . import main

sys.exit(main())
