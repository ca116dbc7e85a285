"""Leave out of torch's log the ops that fail on fake tensors, where the error is raised or handled.

E1126 fake_tensor.py:3212] failed while attempting to run meta for aten.unfold.default ...   ->   nothing
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def without_fake_errors() -> Iterator[None]:
    """Drop what torch logs of such ops in a block; what else it logs stays."""

    def is_below_error(record: logging.LogRecord) -> bool:  # a new one each time: blocks may be inside of each other
        return record.levelno < logging.ERROR

    LOG.addFilter(is_below_error)
    try:
        yield
    finally:
        LOG.removeFilter(is_below_error)
